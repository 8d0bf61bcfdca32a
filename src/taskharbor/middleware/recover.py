"""Turns whatever a handler raises into a value: one bad handler must never take its worker down."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from taskharbor.context import Job
from taskharbor.middleware import Call


class Raised(msgspec.Struct, frozen=True):
    """An execution that ended with an exception."""

    error: BaseException


async def recover(job: Job, call_next: Call) -> Any:
    try:
        return await call_next(job)
    except (asyncio.CancelledError, GeneratorExit):
        raise  # Said to the handler by somebody else, as a rule; the runner knows who.
    except BaseException as error:  # sys.exit() in a handler ends the job, not the worker.
        return Raised(error)
