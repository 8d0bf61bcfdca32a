import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from taskharbor import Harbor, InvalidRequest, JobFailed, JobState


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
    assert loud.result(timeout=5) == "HI"
    assert loud.record().type == "shout"
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
    misfit = harbor.enqueue("add", {"a": 4, "surprise": 1})
    drain(harbor)
    assert harbor.handle(handle.id).result(5) == 5
    with pytest.raises(JobFailed, match="PayloadInvalid"):
        misfit.result(5)


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
        ({"backoff": 5}, "backoff 5: seconds as"),
        ({"priority": 10**9}, "priority"),
        ({"isolation": "loop"}, "would block the event loop"),
        ({"isolation": "process"}, "at the top of a module"),
        ({"type": "same"}, "declared already"),
        ({"retry": "x"}, "the number of executions"),
        ({"retry": True}, "the number of executions"),
    ],
)
def test_a_wrong_option_is_refused_where_the_job_is_declared(
    harbor: Harbor, options: dict[str, Any], said: str
) -> None:
    harbor.job(type="same")(lambda: None)
    with pytest.raises(InvalidRequest, match=f"'add|same'.*{said}"):
        harbor.job(**{"type": "add", **options})(lambda n: n)
    assert list(harbor.handlers) == ["same"]
