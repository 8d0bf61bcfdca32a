"""The chain around a handler: its order, and what each of our own links does."""

import asyncio
from collections.abc import Awaitable
from typing import Any, NoReturn

import pytest

from records import make_record
from taskharbor import Job, JobTimeout
from taskharbor.codec import Arguments, CodecRegistry
from taskharbor.handlers import Handler
from taskharbor.jobs import SECOND
from taskharbor.middleware import (
    TIMEOUT,
    Call,
    PayloadRejected,
    Raised,
    recover,
    reschedule_timeout,
    timeout,
    validate,
)


def job(**fields: Any) -> Job:
    return Job(make_record("j", now=0, token="k", **fields), 0)


def run(call: Call, **fields: Any) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(30):
            return await call(job(**fields))

    return asyncio.run(main())


def raising(error: BaseException) -> Call:
    async def call(job: Job) -> Any:
        raise error

    return call


# -- recover --------------------------------------------------------------------------------------------------------


class Abort(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), Abort()])
def test_recover_makes_a_value_of_whatever_a_handler_raises(error: BaseException) -> None:
    assert run(recover(raising(error))) == Raised(error)


def test_recover_lets_a_cancellation_through() -> None:
    with pytest.raises(asyncio.CancelledError):
        run(recover(raising(asyncio.CancelledError())))


# -- timeout --------------------------------------------------------------------------------------------------------

SHORT = SECOND // 50


async def for_ever(job: Job) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")


async def for_ever_once_restarted(job: Job) -> NoReturn:
    reschedule_timeout(job, None)
    reschedule_timeout(job, asyncio.get_running_loop().time())
    await for_ever(job)


@pytest.mark.parametrize("call", [for_ever, for_ever_once_restarted])
def test_timeout_ends_what_takes_too_long(call: Call) -> None:
    with pytest.raises(JobTimeout, match=r"0\.02 s"):
        run(timeout(call), timeout_us=SHORT)


def test_timeout_leaves_a_handlers_own_timeout_error_alone() -> None:
    with pytest.raises(TimeoutError, match="socket") as raised:
        run(timeout(raising(TimeoutError("socket"))), timeout_us=30 * SECOND)
    assert not isinstance(raised.value, JobTimeout)


def test_a_handler_that_ends_in_spite_of_its_timeout_has_its_result() -> None:
    async def stubborn(job: Job) -> str:
        try:
            await for_ever(job)
        except asyncio.CancelledError:
            return "done anyway"

    assert run(timeout(stubborn), timeout_us=SHORT) == "done anyway"


def test_a_cancellation_after_the_time_was_up_does_not_undo_it() -> None:
    """As with a thread: told to stop, waited for, and then the worker shuts down too."""

    async def slow_to_stop(job: Job) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            job.stop(TIMEOUT)
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(0)

    with pytest.raises(JobTimeout):
        run(timeout(slow_to_stop), timeout_us=SHORT)


@pytest.mark.parametrize("timeout_us", [SHORT, 0])
def test_a_timeout_can_be_held_while_the_worker_is_busy_with_itself(timeout_us: int) -> None:
    async def needs_a_process(job: Job) -> str:
        reschedule_timeout(job, None)
        await asyncio.sleep(3 * SHORT / SECOND)
        reschedule_timeout(job, asyncio.get_running_loop().time() + 30)
        return "ran"

    assert run(timeout(needs_a_process), timeout_us=timeout_us) == "ran"


# -- validate -------------------------------------------------------------------------------------------------------


def add(a: int, b: int = 2) -> int:
    return a + b


def validating(innermost: Call, **handler: Any) -> Call:
    return validate(Handler("t", add, **handler), CodecRegistry(), innermost)


def test_validate_decodes_for_whoever_comes_after() -> None:
    def innermost(job: Job) -> Awaitable[Any]:
        async def call() -> Any:
            return job.arguments.a, job.arguments.b

        return call()

    assert run(validating(innermost, arguments=Arguments(add)), payload=b'{"a":1}') == (1, 2)


@pytest.mark.parametrize("fields", [{"payload": b'{"a":"x"}'}, {"payload": b"{"}, {"codec": "unheard of"}])
def test_validate_refuses_before_the_handler_runs(fields: dict[str, Any]) -> None:
    with pytest.raises(PayloadRejected):
        run(validating(raising(AssertionError("never called")), arguments=Arguments(add)), **fields)


def test_a_handler_that_takes_the_job_gets_any_payload() -> None:
    async def innermost(job: Job) -> bytes:
        return job.payload

    assert run(validating(innermost), payload=b"\xff", codec="unheard of") == b"\xff"
