"""Checked by mypy (`test_typing.py`) and pyright (`make lint`), never run: types survive the decorator, misuse is an error."""

import asyncio
from typing import TypeVar, assert_type

from taskharbor import Harbor, JobHandle
from taskharbor.testing import assert_enqueued

harbor = Harbor("memory://")


@harbor.job
async def bare(n: int, *, loud: bool = False) -> str:
    return str(n)


@harbor.job(max_attempts=3, queue="q")
def with_options(name: str) -> int:
    return len(name)


assert_type(bare.enqueue(1, loud=True), JobHandle[str])
assert_type(asyncio.run(bare(1)), str)
assert_type(bare.options(delay=5).enqueue(1).result(), str)
assert_type(with_options.enqueue("x"), JobHandle[int])
assert_type(with_options("x"), int)
assert_type(with_options.enqueue_many([("a",), ("b",)]), list[JobHandle[int]])

bare.enqueue("one")  # type: ignore[arg-type]
bare.enqueue(1, quiet=True)  # type: ignore[call-arg]
with_options.enqueue()  # type: ignore[call-arg]
with_options.enqueue_many(["a", "b"])  # type: ignore[list-item]
with_options.enqueue_many([1])  # type: ignore[list-item]
harbor.enqueue_many([with_options.request(1)])  # type: ignore[arg-type]
with_options.delay("x")  # type: ignore[attr-defined]
harbor.worker(untl_empty=True)  # type: ignore[call-arg]
harbor.worker(until_empty="no")  # type: ignore[typeddict-item,arg-type,unused-ignore]
assert_enqueued(with_options, args={"name": "x"}, queue="q")
assert_enqueued(harbor, with_options, quue="q")  # type: ignore[call-arg]
with_options.options(prio=1)  # type: ignore[call-arg]
with_options.options(priority="high")  # type: ignore[typeddict-item,arg-type,unused-ignore]


async def asynchronous() -> None:
    assert_type(await bare.enqueue_async(1), JobHandle[str])
    assert_type(await (await with_options.enqueue_async("x")).result_async(), int)


# With an unbounded one, mypy takes the bare decorator on `def` for one on `async def`; pyright does not.
T = TypeVar("T", bound=str | int)


@harbor.job
def first(items: list[T]) -> T:
    return items[0]


@harbor.job
async def last(items: list[T]) -> T:
    return items[-1]


assert_type(first.enqueue([1]), JobHandle[int])
assert_type(first(["a"]), str)
assert_type(asyncio.run(last(["a"])), str)
