"""A client that leaves in the middle of a long poll must not be given jobs that nobody will do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import Request

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Departure:
    """Notices when the client of a request leaves. Its body must have been read."""

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._left: asyncio.Future[Any] | None = None

    def __enter__(self) -> Self:
        self._left = asyncio.ensure_future(self._receive())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left is not None:
            self._left.cancel()

    @property
    def has_left(self) -> bool:
        return self._left is not None and self._left.done()

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives; ClientGone, and the work is cancelled, where the client leaves first."""
        assert self._left is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        if not task.done() or task.cancelled():
            raise ClientGone
        return task.result()
