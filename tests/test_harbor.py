import asyncio
import copy
import importlib
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from taskharbor import (
    AsyncClient,
    Harbor,
    InvalidRequest,
    JobFailed,
    JobHandle,
    JobRequest,
    JobState,
    Outcome,
    QueueNotFound,
    ResultNotKept,
)
from taskharbor.broker.tokens import parse_token
from taskharbor.testing.broker import running_broker


@pytest.fixture
def harbor() -> Harbor:
    return Harbor("memory://")


def drain(harbor: Harbor) -> None:
    harbor.worker(until_empty=True).run()


@dataclass
class Order:
    id: int
    lines: list[str]


def test_declare_enqueue_run_read_the_result(harbor: Harbor) -> None:
    @harbor.job
    async def total(order: Order, *, factor: int = 2) -> int:
        return len(order.lines) * factor

    @harbor.job(type="shout")
    def upper(text: str) -> str:
        return text.upper()

    @harbor.job
    async def make() -> Order:
        return Order(7, [])

    handle, loud, made = total.enqueue(Order(1, ["a", "b"]), factor=5), upper.enqueue("hi"), make.enqueue()
    assert handle.state() is JobState.READY
    drain(harbor)
    assert handle.result(timeout=5) == 10
    assert (loud.result(timeout=5), loud.record().type) == ("HI", "shout")
    assert made.result(timeout=5) == Order(7, [])


def test_a_declared_job_is_still_a_function(harbor: Harbor) -> None:
    @harbor.job
    async def triple(n: int) -> int:
        """Thrice."""
        return 3 * n

    plain = harbor.job(type="plain")(lambda n: 3 * n)
    assert (asyncio.run(triple(2)), plain(2)) == (6, 6)
    assert (triple.__name__, triple.__doc__) == ("triple", "Thrice.")


def test_options_for_one_call(harbor: Harbor) -> None:
    @harbor.job(queue="mail", priority=1, max_attempts=9)
    async def send(to: str) -> None: ...

    record = send.options(priority=5, delay=60, headers={"a": "b"}).enqueue("ada").record()
    assert (record.queue, record.priority, record.max_attempts) == ("mail", 5, 9)
    assert record.state is JobState.SCHEDULED
    assert send.enqueue("eve").record().priority == 1
    first, again = send.options(key="k").enqueue("a"), send.options(key="k").enqueue("b")
    assert (again.id, again.existed) == (first.id, True)
    assert harbor.worker().config.queues == ("default", "mail")
    with pytest.raises(TypeError, match="unknown option prio"):
        send.options(prio=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown option prio"):
        harbor.job(prio=1)  # type: ignore[call-overload]


def test_many_at_once(harbor: Harbor) -> None:
    @harbor.job
    async def add(a: int, b: int) -> int:
        return a + b

    @harbor.job
    async def greet(name: str) -> str:
        return f"Hello, {name}"

    sums = add.enqueue_many([(1, 2), {"a": 3, "b": 4}])
    mixed = harbor.enqueue_many([add.request(5, 6), greet.request("Ada")])
    drain(harbor)
    assert [one.result(5) for one in sums] == [3, 7]
    assert [one.result(5) for one in mixed] == [11, "Hello, Ada"]


@pytest.mark.parametrize("call", ["ada", b"ada", 7])
def test_what_is_not_a_call_is_named(harbor: Harbor, call: object) -> None:
    @harbor.job
    async def greet(name: str) -> None: ...

    with pytest.raises(TypeError, match="is not a call: give a tuple"):
        greet.enqueue_many([("eve",), call])  # type: ignore[list-item]
    assert harbor.client.stats() == []


def test_calls_are_checked_before_any_is_sent(harbor: Harbor) -> None:
    @harbor.job
    async def store(data: str) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'data'"):
        store.enqueue()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        store.enqueue("a", more=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match=r"Expected `str`, got `int` - at `\$\.data`"):
        store.enqueue(1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="store the data elsewhere"):
        store.enqueue_many([("small",), ("x" * 2_000_000,)])
    assert harbor.client.stats() == []
    assert store.enqueue_many([]) == []
    ids = [handle.id for handle in store.options(priority=3).enqueue_many([("a",), ["b"], {"data": "c"}])]
    records = [harbor.client.get(job) for job in ids]
    assert [record.payload for record in records] == [b'{"data":"a"}', b'{"data":"b"}', b'{"data":"c"}']
    assert {record.priority for record in records} == {3}


def test_by_name_for_producers_without_the_code(harbor: Harbor) -> None:
    @harbor.job
    async def add(a: int, b: int = 1) -> int:
        return a + b

    handle = harbor.enqueue("add", {"a": 4}, priority=2)
    misfit = harbor.client.enqueue(JobRequest(type="add", payload={"a": 4, "surprise": 1}, max_attempts=1))
    drain(harbor)
    assert harbor.handle(handle.id).result(5) == 5
    with pytest.raises(JobFailed, match="PayloadInvalid") as failed:
        misfit.result(5)
    assert (failed.value.job.id, failed.value.state) == (misfit.id, JobState.DEAD)
    assert "surprise" in str(copy.copy(failed.value).error)
    assert [one.outcome for one in misfit.attempts()] == [Outcome.DEAD]
    assert misfit.requeue() is JobState.READY


@pytest.mark.parametrize("payload", [{"a": 4, "surprise": 1}, {"a": "x"}, {}, [4], "4"])
def test_by_name_a_declared_job_keeps_its_options_and_checks_its_payload(
    harbor: Harbor, payload: Any
) -> None:
    @harbor.job(queue="sums", max_attempts=2, priority=3)
    async def add(a: int, b: int = 1) -> int:
        return a + b

    stored = harbor.enqueue("add", {"a": 4}, priority=1).record()
    assert (stored.queue, stored.max_attempts, stored.priority) == ("sums", 2, 1)
    with pytest.raises(InvalidRequest, match="add"):
        harbor.enqueue("add", payload)
    with pytest.raises(InvalidRequest, match="add"):
        harbor.enqueue_many([add.request(1), JobRequest(type="add", payload=payload)])
    assert harbor.client.stats("sums")[0].counts[JobState.READY] == 1


def test_a_result_is_returned_or_the_reason_is_raised(harbor: Harbor) -> None:
    @harbor.job(max_result_bytes=10)
    async def repeat(times: int) -> str:
        return "x" * times

    @harbor.job
    def without_form() -> object:
        return object()

    handles: list[JobHandle[Any]] = [repeat.enqueue(8), repeat.enqueue(9), without_form.enqueue()]
    drain(harbor)
    assert repeat.handle(handles[0].id).result() == "x" * 8
    for handle, reason in zip(handles[1:], ("11 bytes, and at most 10", "has no JSON form"), strict=True):
        assert handle.state() is JobState.DONE
        with pytest.raises(ResultNotKept, match=reason):
            handle.result()
    with pytest.raises(InvalidRequest, match="max_result_bytes=2000000"):
        harbor.job(type="large", max_result_bytes=2_000_000)(lambda: None)


async def test_a_blocking_call_inside_a_loop_names_the_async_form(harbor: Harbor) -> None:
    @harbor.job
    async def nothing() -> None:
        pass

    handle = await nothing.enqueue_async()
    for call in (handle.wait, handle.result, lambda: harbor.client.wait_for(handle.id), harbor.worker().run):
        with pytest.raises(RuntimeError, match=r"would block the event loop.*use await"):
            call()
    async with AsyncClient(harbor.driver()) as client:
        again = await client.enqueue(nothing.request())
        assert await again.cancel_async() is JobState.CANCELLED
        with pytest.raises(RuntimeError, match="_async"):
            again.state()
    await harbor.close_async()


def test_a_row_that_does_not_fit_is_named(harbor: Harbor) -> None:
    @harbor.job
    async def add(a: int, b: int = 1) -> int:
        return a + b

    for rows, error in (([(1,), (1, 2, 3)], TypeError), ([(1,), {"a": "x"}], InvalidRequest)):
        with pytest.raises(error, match=r"row 1: .*add"):
            add.enqueue_many(rows)  # type: ignore[arg-type]
    assert harbor.client.stats() == []


def test_a_program_closes_what_it_opened(tmp_path: Path) -> None:
    with Harbor(f"sqlite:///{tmp_path}/jobs.db") as harbor:
        first = harbor.client
        assert first.stats() == []
    assert harbor._client is None

    async def main() -> None:
        async with harbor:
            assert await harbor.async_client().stats() == []
        assert not harbor._async_clients

    asyncio.run(main())


def test_the_modules_of_an_app_are_imported_when_a_worker_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "shop_app": "from taskharbor import Harbor\nharbor = Harbor('memory://', imports=['shop.mail'])\n"
        "harbor.discover('shop.late')\n",
        "shop/__init__": "",
        "shop/late/__init__": "",
        **{
            f"shop/{name}": f"from shop_app import harbor\n@harbor.job(queue={name[-4:]!r})\ndef {name[-4:]}() -> None: ...\n"
            for name in ("mail", "late/ship", "late/bill", "left")
        },
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    app = importlib.import_module("shop_app").harbor
    assert app.handlers == {}
    assert sorted(app.worker().handlers) == ["bill", "mail", "ship"]
    assert sorted(app.queues) == ["bill", "default", "mail", "ship"]
    with pytest.raises(ModuleNotFoundError, match="nopkg") as missing:
        Harbor("memory://", imports=["nopkg.x"]).worker()
    assert missing.value.__notes__ == ["the app imports 'nopkg.x': see its imports= and discover()"]
    with pytest.raises(InvalidRequest, match=r"declares no job.*imports="):
        Harbor("memory://").worker()


async def test_everything_has_an_async_form(harbor: Harbor) -> None:
    @harbor.job
    async def add(a: int, b: int) -> int:
        return a + b

    one = await add.enqueue_async(1, 2)
    (two,) = await add.enqueue_many_async([(3, 4)])
    three = await harbor.enqueue_async("add", {"a": 5, "b": 6})
    gone = await add.enqueue_async(0, 0)
    assert await gone.cancel_async() is JobState.CANCELLED
    await harbor.worker(until_empty=True).run_async()
    assert [await handle.result_async(5) for handle in (one, two, three)] == [3, 7, 11]
    assert await one.state_async() is JobState.DONE
    assert await one.progress_async() is None
    await harbor.close_async()


SHORT = """
import asyncio, sys
from taskharbor import Harbor

harbor = Harbor(sys.argv[1])

async def main():
    await harbor.enqueue_async("greet")

harbor.enqueue("greet")
asyncio.run(main())
"""


@pytest.mark.parametrize("store", ["broker", "sqlite", "file", "postgres_url", "redis_url"])
def test_a_short_program_that_closes_nothing_ends_in_silence(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with ExitStack() as stack:
        if store == "broker":
            url = stack.enter_context(running_broker("memory://"))
        else:
            url = request.getfixturevalue(store) if "_" in store else f"{store}:///{tmp_path}/jobs"
        command = [sys.executable, "-W", "always", "-c", SHORT, url]
        ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKHARBOR_URL", "memory://from-the-environment")
    first, second = Harbor(), Harbor()
    job = first.enqueue("t").id
    assert second.client.get(job).id == job


def test_closing_and_using_again(harbor: Harbor) -> None:
    job = harbor.enqueue("t")
    harbor.close()
    assert job.state() is JobState.READY
    assert "0 jobs" in repr(harbor)


def test_a_number_as_retry_is_the_number_of_executions(harbor: Harbor) -> None:
    assert harbor.job(type="thrice", retry=3)(lambda: None).enqueue().record().max_attempts == 3
    with pytest.raises(InvalidRequest, match="leave one out"):
        harbor.job(retry=3, max_attempts=2)(lambda: None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": 5}, "queue"),
        ({"max_attempts": "3"}, "max_attempts"),
        ({"timeout": "5s"}, "timeout '5s': give seconds"),
        ({"backoff": 5}, "backoff 5: give seconds as"),
        ({"priority": 10**9}, "priority"),
        ({"isolation": "loop"}, "would block the event loop"),
        ({"isolation": "process"}, "at the top of a module"),
        ({"type": "same"}, "declared already"),
        *(({"retry": wrong}, "the number of executions") for wrong in ("x", True)),
    ],
)
def test_a_wrong_option_is_refused(harbor: Harbor, options: dict[str, Any], said: str) -> None:
    """Where the job is declared."""
    harbor.job(type="same")(lambda: None)
    with pytest.raises(InvalidRequest, match=f"'add|same'.*{said}"):
        harbor.job(**{"type": "add", **options})(lambda n: n)
    assert list(harbor.handlers) == ["same"]


def test_a_worker_applies_the_declared_queues(harbor: Harbor, caplog: pytest.LogCaptureFixture) -> None:
    """Once: the next start does not undo what an operator changed. A queue of the app may be changed before it is used."""
    caplog.set_level("INFO")
    harbor.queue("mail", max_inflight=2, failure_queue="failed")

    @harbor.job(queue="mail")
    async def send() -> None: ...

    harbor.client.pause("mail")
    with pytest.raises(QueueNotFound):
        harbor.client.pause("failed")
    drain(harbor)
    assert "queue mail: declared max_inflight=2, failure_queue=failed" in caplog.messages
    settings = harbor.client.settings("mail")
    assert (settings.paused, settings.max_inflight, settings.failure_queue) == (True, 2, "failed")
    harbor.client.configure("mail", max_inflight=5)
    drain(harbor)
    assert harbor.client.settings("mail").max_inflight == 5


def test_a_wrong_declaration_of_a_queue_is_refused(harbor: Harbor) -> None:
    harbor.queue("mail", keep_done=60)
    with pytest.raises(InvalidRequest, match="'mail' is declared already"):
        harbor.queue("mail", max_inflight=1)
    with pytest.raises(InvalidRequest, match="max_inflight 0"):
        harbor.queue("other", max_inflight=0)
    with pytest.raises(TypeError, match="unknown setting limit of queue 'other'"):
        harbor.queue("other", limit=1)  # type: ignore[call-arg]
    assert harbor.declared_queues == {"mail": {"keep_done": 60}}


def test_a_worker_that_may_not_change_settings_works_without_them(caplog: pytest.LogCaptureFixture) -> None:
    """Behind a broker only an operator's token may. The log names the queue and the reason."""
    token = parse_token("crew:produce,work,read:a-secret-for-the-crew")
    with (
        running_broker("memory://", tokens=(token,)) as url,
        Harbor(url.replace("://", "://a-secret-for-the-crew@")) as harbor,
    ):
        harbor.queue("default", max_inflight=2)

        @harbor.job
        async def add(a: int) -> int:
            return a + 1

        handle = add.enqueue(1)
        harbor.worker(until_empty=True).run()
        assert handle.result() == 2
    assert "the declaration of queue default is not applied" in caplog.text
    assert "no scope admin" in caplog.text
