"""Checked by mypy in `test_typing.py`, never run: types survive the decorator, and misuse is an error."""

import asyncio
from typing import assert_type

from taskharbor import Harbor, JobHandle

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
with_options.options(prio=1)  # type: ignore[call-arg]
with_options.options(priority="high")  # type: ignore[typeddict-item,arg-type,unused-ignore]


async def asynchronous() -> None:
    assert_type(await bare.enqueue_async(1), JobHandle[str])
    assert_type(await (await with_options.enqueue_async("x")).result_async(), int)
