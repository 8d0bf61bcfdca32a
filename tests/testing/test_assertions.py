"""What was enqueued, and messages that show what was enqueued instead."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskharbor import Harbor, JobState
from taskharbor.clock import FakeClock
from taskharbor.harbor import SyncJobType
from taskharbor.testing import assert_enqueued, drain, enqueued, memory_store, refute_enqueued


class App:
    def __init__(self) -> None:
        self.harbor = harbor = Harbor("memory://")

        @harbor.job
        def mail(to: str, options: dict[str, Any] | None = None, at: datetime | None = None) -> None: ...

        @harbor.job(queue="images")
        def resize(width: int, height: int) -> None: ...

        self.mail: SyncJobType[..., None] = mail
        self.resize: SyncJobType[..., None] = resize


@pytest.fixture
def app() -> Iterator[App]:
    app = App()
    with memory_store(app.harbor):
        yield app


def test_by_type_name_or_anything_oldest_first(app: App) -> None:
    handles = [app.mail.enqueue(name) for name in ("a", "b", "c")]

    assert_enqueued(app.harbor, "mail")
    assert_enqueued(app.harbor)
    refute_enqueued(app.harbor, app.resize)
    assert [record.id for record in enqueued(app.harbor, app.mail)] == [handle.id for handle in handles]
    assert [record.id for record in assert_enqueued(app.harbor, args={"to": "b"})] == [handles[1].id]


def test_arguments_by_position_or_by_name_as_a_subset_at_any_depth(app: App) -> None:
    app.mail.enqueue("ada", options={"urgent": True, "tags": {"a": 1, "b": 2}})
    app.resize.enqueue(100, 200)

    assert_enqueued(app.harbor, app.mail, args={"to": "ada"})
    assert_enqueued(app.harbor, app.mail, args={"options": {"tags": {"b": 2}}})
    for wrong in ({"to": "bob"}, {"cc": None}, {"options": {"tags": {"c": 3}}}):
        refute_enqueued(app.harbor, app.mail, args=wrong)
    assert_enqueued(app.harbor, app.resize, args=(100,))
    assert_enqueued(app.harbor, app.resize, args=[100, 200])
    for other in ((200,), (100, 200, 300)):
        refute_enqueued(app.harbor, app.resize, args=other)


def test_arguments_are_compared_as_they_are_stored(app: App) -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    app.mail.enqueue("ada", at=moment)

    assert_enqueued(app.harbor, app.mail, args={"at": moment})
    refute_enqueued(app.harbor, app.mail, args={"at": moment + timedelta(seconds=1)})


def test_every_option_can_be_asked_for(app: App) -> None:
    clock = app.harbor.clock
    assert isinstance(clock, FakeClock)
    app.mail.options(
        queue="post",
        key="ada",
        idempotency_key="once",
        priority=3,
        delay=90,
        headers={"trace": "1", "x": "2"},
    ).enqueue("ada")

    due = clock.now_datetime + timedelta(seconds=90)
    assert_enqueued(app.harbor, queue="post", key="ada", idempotency_key="once", priority=3)
    assert_enqueued(app.harbor, delay=90, run_at=due, headers={"trace": "1"})
    assert_enqueued(app.harbor, delay=timedelta(seconds=90), states={JobState.SCHEDULED})
    for wrong in (
        {"queue": "default"},
        {"key": "bob"},
        {"idempotency_key": "twice"},
        {"priority": 0},
        {"delay": 0},
        {"run_at": due + timedelta(seconds=1)},
        {"headers": {"trace": "2"}},
        {"states": {JobState.DONE}},
    ):
        refute_enqueued(app.harbor, **wrong)


def test_a_job_that_has_run_was_enqueued_all_the_same(app: App) -> None:
    app.mail.enqueue("ada")
    drain(app.harbor)

    assert_enqueued(app.harbor, app.mail, count=1)
    refute_enqueued(app.harbor, app.mail, states={JobState.READY})


def test_the_message_shows_what_was_enqueued_instead(app: App) -> None:
    app.mail.enqueue("bob")
    app.resize.options(delay=5, key="k").enqueue(1, 2)

    with pytest.raises(AssertionError) as failed:
        assert_enqueued(app.harbor, app.mail, args={"to": "ada"}, queue="default")

    assert str(failed.value) == (
        "mail with args={'to': 'ada'}, queue='default' was not enqueued.\n"
        "Enqueued were:\n"
        "  mail(to='bob', options=None, at=None) in 'default', ready\n"
        "  resize(width=1, height=2) in 'images', scheduled, key='k', delay=5.0"
    )


def test_counts_are_exact(app: App) -> None:
    with pytest.raises(AssertionError, match=r"mail was not enqueued\.\nNothing was enqueued at all\."):
        assert_enqueued(app.harbor, app.mail)
    app.mail.enqueue_many([("ada",), ("ada",)])

    assert_enqueued(app.harbor, app.mail, count=2)
    assert_enqueued(app.harbor, app.resize, count=0)
    with pytest.raises(AssertionError, match="mail was enqueued 2 times, not once"):
        assert_enqueued(app.harbor, app.mail, count=1)
    with pytest.raises(AssertionError, match="mail was enqueued 2 times"):
        refute_enqueued(app.harbor, app.mail)


def test_a_long_list_is_cut_short(app: App) -> None:
    app.mail.enqueue_many([(f"user{number}",) for number in range(30)])

    with pytest.raises(AssertionError, match=r"the last 20 of 30") as failed:
        assert_enqueued(app.harbor, app.resize)
    assert "user29" in str(failed.value)
    assert "user9'" not in str(failed.value)


def test_payloads_that_are_no_call_are_shown_as_they_are(app: App) -> None:
    app.harbor.enqueue("foreign", [1, 2])

    assert_enqueued(app.harbor, "foreign", args=[1, 2])
    with pytest.raises(AssertionError, match=r"foreign\(\[1, 2\]\) in 'default', ready"):
        assert_enqueued(app.harbor, app.mail)
    with pytest.raises(TypeError, match="unknown expectation 'to'"):
        assert_enqueued(app.harbor, "foreign", to="ada")  # type: ignore[call-arg]


async def test_they_work_inside_a_running_loop(app: App) -> None:
    await app.mail.enqueue_async("ada")
    assert_enqueued(app.harbor, app.mail, args={"to": "ada"})
