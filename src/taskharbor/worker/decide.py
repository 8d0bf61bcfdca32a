"""Decides which settlement to write for an execution that has ended. Pure functions: no clock, no backend, no loop."""

from __future__ import annotations

import inspect
import logging
import os
import traceback
from types import TracebackType
from typing import Any

import taskharbor.signals as signals
from taskharbor.codec import CodecRegistry, NotKept
from taskharbor.drivers.contract import Ack, Discard, Fail, Release, RetryAt, Settlement
from taskharbor.errors import HandlerMissing, PayloadInvalid, RemoteError
from taskharbor.handlers import Handler
from taskharbor.jobs import LATEST, Failure, JobRecord, Micros
from taskharbor.middleware import PayloadRejected, Raised
from taskharbor.retry import retry_delay

log = logging.getLogger("taskharbor.worker")

_LONGEST_REASON = 500
_OWN_CODE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class NotAwaited(TypeError):
    """A plain function handed back a coroutine: nothing of the work has happened."""


def decide(
    record: JobRecord, handler: Handler, outcome: Any, codecs: CodecRegistry, now: Micros
) -> Settlement:
    """`outcome` is what the middleware chain gave: the handler's result, or `Raised`."""
    token = record.token
    assert token is not None
    if not isinstance(outcome, Raised):
        try:
            return Ack(record.id, token, encode_result(handler, record, outcome, codecs))
        except NotAwaited as unfinished:
            error: BaseException = unfinished
    else:
        error = outcome.error
    signal = signals.find_signal(error)
    run_at = None if signal is None else signal.run_at(now)
    if isinstance(signal, signals.Snooze):
        return Release(record.id, token, run_at)
    if isinstance(signal, signals.Cancel):
        return Discard(record.id, token, describe(error))
    if isinstance(error, PayloadRejected):
        # A codec this worker does not know says nothing about the payload: that is never completed.
        if handler.on_invalid == "complete" and isinstance(error.cause, PayloadInvalid):
            return Ack(record.id, token)
        # The execution never began: no failure is counted against the job.
        reason = Failure.of(type(error.cause).__name__, str(error.cause))
        return Fail(record.id, token, record.attempts, reason)
    attempts = record.attempts + 1
    failure = describe(error)
    if isinstance(signal, signals.Unrecoverable) or record.spent + 1 >= record.max_attempts:
        return Fail(record.id, token, attempts, failure)
    if run_at is None:
        assert not isinstance(handler.retry, int)
        delay = retry_delay(handler.retry, record, attempts, error)
        if delay is None:
            return Fail(record.id, token, attempts, failure)
        run_at = min(now + delay, LATEST)
    return RetryAt(record.id, token, run_at, attempts, failure)


def no_handler(record: JobRecord) -> Settlement:
    assert record.token is not None
    message = f"no handler for type {record.type!r}"
    return Fail(record.id, record.token, record.attempts, Failure(HandlerMissing.__name__, message))


def describe(error: BaseException) -> Failure:
    """Make the failure that is stored for an exception. Its traceback has no frames of TaskHarbor: they say nothing to a user."""
    if isinstance(error, (RemoteError, signals.HandlerSignal)) and error.failure is not None:
        return error.failure
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception:
        message = "(an error that cannot be put in words: its __str__ fails)"
    if isinstance(error, signals.HandlerSignal):
        return Failure.of(kind, message)
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next
    detail = "".join(traceback.format_exception(type(error), error, trace)) if trace is not None else ""
    return Failure.of(kind, message, detail)


def _is_own(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_OWN_CODE) or file.endswith(("asyncio/timeouts.py", "asyncio\\timeouts.py"))


def encode_result(handler: Handler, record: JobRecord, result: Any, codecs: CodecRegistry) -> bytes | None:
    """The result in the record's codec. None stands for none. One that cannot be kept becomes the reason."""
    if result is None:
        return None
    if isinstance(result, NotKept):  # From a process of its own.
        return result.encode()
    try:
        encoded = codecs.get(record.codec).encode(result)
        if len(encoded) <= handler.max_result_bytes:
            return encoded
        most = f"at most {handler.max_result_bytes} are kept (max_result_bytes)"
        reason = f"it has {len(encoded)} bytes, and {most}"
    except Exception as error:
        if inspect.iscoroutine(result):
            result.close()
            raise NotAwaited(
                f"the handler of {record.type} returned a coroutine nobody awaited: make it 'async def'"
            ) from None
        reason = str(error).replace("the payload", "it")[:_LONGEST_REASON]
    # The work is done: a result that cannot be kept is no reason to do it again.
    log.warning("the result of %s %s is not kept: %s", record.type, record.id, reason)
    return NotKept(reason).encode()
