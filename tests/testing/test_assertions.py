"""What was enqueued, and messages that show what was enqueued instead."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskharbor import Harbor, JobState
from taskharbor.clock import FakeClock
from taskharbor.testing import assert_enqueued, drain, enqueued, memory_store, refute_enqueued

harbor = Harbor("memory://")


@harbor.job
def mail(to: str, options: dict[str, Any] | None = None, at: datetime | None = None) -> None: ...


@harbor.job(queue="images")
def resize(width: int, height: int) -> None: ...


@pytest.fixture(autouse=True)
def clock() -> Iterator[FakeClock]:
    with memory_store(harbor):
        assert isinstance(harbor.clock, FakeClock)
        yield harbor.clock


def test_by_type_or_name_or_anything_oldest_first_and_also_when_the_job_has_run() -> None:
    handles = [mail.enqueue(name) for name in ("a", "b", "c")]
    assert_enqueued(harbor, "mail")
    assert_enqueued(harbor)
    refute_enqueued(harbor, resize)
    assert [record.id for record in enqueued(harbor, mail)] == [handle.id for handle in handles]
    assert [record.id for record in assert_enqueued(harbor, args={"to": "b"})] == [handles[1].id]
    drain(harbor)
    assert_enqueued(harbor, mail, count=3)
    refute_enqueued(harbor, mail, states={JobState.READY})


def test_arguments_by_position_or_by_name_as_a_subset_at_any_depth_and_as_they_are_stored() -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    mail.enqueue("ada", options={"urgent": True, "tags": {"a": 1, "b": 2}}, at=moment)
    resize.enqueue(100, 200)
    for args in ({"to": "ada"}, {"options": {"tags": {"b": 2}}}, {"at": moment}):
        assert_enqueued(harbor, mail, args=args)
    later = moment + timedelta(seconds=1)
    for wrong in ({"to": "bob"}, {"options": {"tags": {"c": 3}}}, {"at": later}):
        refute_enqueued(harbor, mail, args=wrong)
    assert_enqueued(harbor, resize, args=(100,))
    assert_enqueued(harbor, resize, args=[100, 200])
    refute_enqueued(harbor, resize, args=(200,))
    assert not enqueued(harbor, args=(100, 200, 300))


def test_every_option_can_be_asked_for(clock: FakeClock) -> None:
    headers = {"trace": "1", "x": "2"}
    job = mail.options(queue="post", key="ada", idempotency_key="once", priority=3, delay=90, headers=headers)
    job.enqueue("ada")
    due = clock.now_datetime + timedelta(seconds=90)
    assert_enqueued(harbor, queue="post", key="ada", idempotency_key="once", priority=3)
    assert_enqueued(harbor, delay=90, run_at=due, headers={"trace": "1"})
    assert_enqueued(harbor, delay=timedelta(seconds=90), states={JobState.SCHEDULED})
    wrong: dict[str, Any] = {"queue": "default", "key": "bob", "idempotency_key": "twice"}
    wrong |= {"priority": 0, "delay": 0}
    wrong |= {"run_at": due + timedelta(seconds=1), "headers": {"trace": "2"}, "states": {JobState.DONE}}
    for name, value in wrong.items():
        refute_enqueued(harbor, **{name: value})
    with pytest.raises(TypeError, match="unknown expectation 'to'"):
        assert_enqueued(harbor, to="ada")  # type: ignore[call-arg]


def test_the_message_shows_what_was_enqueued_instead() -> None:
    mail.enqueue("bob")
    resize.options(delay=5, key="k").enqueue(1, 2)
    harbor.enqueue("foreign", [1, 2])
    with pytest.raises(AssertionError) as failed:
        assert_enqueued(harbor, mail, args={"to": "ada"}, queue="default")
    assert str(failed.value) == (
        "mail with args={'to': 'ada'}, queue='default' was not enqueued.\n"
        "Enqueued were:\n"
        "  mail(to='bob', options=None, at=None) in 'default', ready\n"
        "  resize(width=1, height=2) in 'images', scheduled, key='k', delay=5.0\n"
        "  foreign([1, 2]) in 'default', ready"
    )
    assert_enqueued(harbor, "foreign", args=[1, 2])


def test_counts_are_exact_and_a_long_list_is_cut_short() -> None:
    with pytest.raises(AssertionError, match=r"mail was not enqueued\.\nNothing was enqueued at all\."):
        assert_enqueued(harbor, mail)
    mail.enqueue_many([(f"user{number}",) for number in range(30)])
    assert_enqueued(harbor, mail, count=30)
    assert_enqueued(harbor, resize, count=0)
    with pytest.raises(AssertionError, match="mail was enqueued 30 times, not once"):
        assert_enqueued(harbor, mail, count=1)
    with pytest.raises(AssertionError, match="mail was enqueued 30 times"):
        refute_enqueued(harbor, mail)
    with pytest.raises(AssertionError, match=r"the last 20 of 30") as failed:
        assert_enqueued(harbor, resize)
    assert "user29" in str(failed.value)
    assert "user9'" not in str(failed.value)


def test_a_declared_job_stands_for_its_app() -> None:
    handle = mail.enqueue("ada")
    assert [record.id for record in assert_enqueued(mail, args={"to": "ada"})] == [handle.id]
    assert [record.id for record in enqueued(mail)] == [handle.id]
    refute_enqueued(mail, args={"to": "bob"})
    with pytest.raises(AssertionError, match=r"resize was not enqueued\.\nEnqueued were:\n  mail\(to='ada'"):
        assert_enqueued(resize)


async def test_they_work_inside_a_running_loop() -> None:
    await mail.enqueue_async("ada")
    assert_enqueued(harbor, mail, args={"to": "ada"})
