"""Checks a payload against the handler's types before the handler runs.

An invalid payload would be invalid again: it is never retried.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from taskharbor.codec import CodecRegistry
from taskharbor.context import Job
from taskharbor.errors import CodecError
from taskharbor.handlers import Handler
from taskharbor.middleware import Call, Middleware


class PayloadRejected(Exception):
    """Apart from CodecError, which a handler's own code may raise for reasons of its own."""

    def __init__(self, cause: CodecError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def validate_for(handler: Handler, codecs: CodecRegistry) -> Middleware:
    arguments = handler.arguments
    if arguments is None:
        return lambda job, call_next: call_next(job)

    def validate(job: Job, call_next: Call) -> Awaitable[Any]:
        try:
            job.arguments = arguments.decode(codecs.get(job.record.codec), job.record.payload)
        except CodecError as misfit:
            raise PayloadRejected(misfit) from misfit
        return call_next(job)

    return validate
