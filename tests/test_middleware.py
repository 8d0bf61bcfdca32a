"""Links of the chain around a handler, where a whole worker (tests/worker/test_outcomes.py) shows too little of them."""

import asyncio
from typing import Any

import pytest

from records import make_record
from taskharbor import Job
from taskharbor.codec import Arguments, CodecRegistry
from taskharbor.handlers import Handler
from taskharbor.middleware import Call, PayloadRejected, timeout, validate


def run(call: Call, **fields: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(30):
            return await call(Job(make_record("j", now=0, token="k", **fields), 0))

    return asyncio.run(main())


def test_a_handler_that_ends_in_spite_of_its_timeout_has_its_result() -> None:
    async def stubborn(job: Job) -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "done anyway"
        return "never cancelled"

    assert run(timeout(stubborn), timeout_us=20_000) == "done anyway"


def add(a: int, b: int = 2) -> int:
    return a + b


@pytest.mark.parametrize("fields", [{"payload": b'{"a":"x"}'}, {"payload": b"{"}, {"codec": "unheard of"}])
def test_validate_refuses_before_the_handler_runs(fields: dict[str, Any]) -> None:
    async def innermost(job: Job) -> None:
        raise AssertionError("never called")

    with pytest.raises(PayloadRejected):
        run(validate(Handler("t", add, arguments=Arguments(add)), CodecRegistry(), innermost), **fields)


def test_a_handler_that_takes_the_job_gets_any_payload() -> None:
    async def innermost(job: Job) -> bytes:
        return job.payload

    call = validate(Handler("t", add), CodecRegistry(), innermost)
    assert run(call, payload=b"\xff", codec="unheard of") == b"\xff"
