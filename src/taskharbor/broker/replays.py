"""Answers that may not have arrived: who asks again under the same name gets the same answer, and nothing happens twice.

A client that lost an answer cannot know whether its call took effect. Enqueues carry ids and ends are final, so most calls could
simply be made again; but a second reserve would leave the jobs of the first to wait for the end of their leases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from taskharbor.broker.exchange import ClientGone
from taskharbor.errors import BackendUnavailable, InvalidRequest

KEEP_SECONDS = 60.0
MAX_BYTES = 32 * 1_048_576
MAX_ANSWERS = 20_000
LONGEST_NAME = 64
MOST_HEARD = 64


class Name(NamedTuple):
    """The name that a caller gives to one of its calls."""

    caller: str
    request: str


class Replay(NamedTuple):
    """An answer, and whether an earlier call made it."""

    answer: Any
    is_repeated: bool
    """It was made for an earlier call of this name."""


class _Kept:
    __slots__ = ("answer", "at", "operation", "size")

    def __init__(self, operation: str, answer: asyncio.Future[Any], at: float) -> None:
        self.operation = operation
        self.answer = answer
        self.at = at
        self.size = 0


class Replays:
    """The kept answers. Used from the server's loop. They are bounded in time, in bytes and in number."""

    def __init__(
        self,
        *,
        keep_seconds: float = KEEP_SECONDS,
        max_bytes: int = MAX_BYTES,
        time: Callable[[], float] | None = None,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._time = time or (lambda: asyncio.get_running_loop().time())
        self._kept: dict[Name, _Kept] = {}
        """Kept answers in the order of their requests."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def once(
        self,
        name: Name,
        operation: str,
        make: Callable[[], Awaitable[Any]],
        still_holds: Callable[[Any], bool] = lambda answer: True,
    ) -> Replay:
        """Return the answer that was made under this name, also by a call that is still under way, if it still holds; else make
        one now."""
        while (kept := self._kept.get(name)) is not None:
            if kept.operation != operation:
                raise InvalidRequest(
                    f"the request id was used for {kept.operation} already: make a new one for every call, "
                    "and keep it for repeated tries of the same call only"
                )
            # If the client of the call under way leaves, this call is made in its place.
            with contextlib.suppress(ClientGone):
                answer = await asyncio.shield(kept.answer)
                if still_holds(answer):
                    return Replay(answer, True)
                self.forget(name)
        kept = self._kept[name] = _Kept(operation, asyncio.get_running_loop().create_future(), self._time())
        try:
            answer = await make()
        except BaseException as error:
            del self._kept[name]
            _hand_on(error, kept.answer)
            raise
        kept.answer.set_result(answer)
        return Replay(answer, False)

    def weigh(self, name: Name, size: int) -> None:
        """Note the size of the answer of this name. Makes room by forgetting the oldest."""
        kept = self._kept.get(name)
        if kept is not None:
            self._bytes += size - kept.size
            kept.size = size
        self._make_room()

    def replace(self, name: Name, answer: Any) -> None:
        """Replace the answer for a repeated call of this name."""
        kept = self._kept.get(name)
        if kept is not None:
            kept.answer = asyncio.get_running_loop().create_future()
            kept.answer.set_result(answer)

    def forget(self, name: Name) -> None:
        """Forget the answer: a repeated call of this name is a new call."""
        kept = self._kept.get(name)
        if kept is not None and kept.answer.done():
            del self._kept[name]
            self._bytes -= kept.size

    def heard(self, caller: str, requests: Iterable[str]) -> None:
        """Note that these answers have arrived."""
        for request in requests:
            self.forget(Name(caller, request))

    def _make_room(self) -> None:
        too_old = self._time() - self._keep_seconds
        for name, kept in list(self._kept.items()) if self._is_over(too_old) else ():
            if not self._is_over(too_old):
                break
            if kept.answer.done():
                self.forget(name)

    def _is_over(self, too_old: float) -> bool:
        if self._bytes > self._max_bytes or len(self._kept) > MAX_ANSWERS:
            return True
        oldest = next(iter(self._kept.values()), None)
        return oldest is not None and oldest.at <= too_old


def _hand_on(error: BaseException, answer: asyncio.Future[Any]) -> None:
    """Pass an error on to the callers that wait for the same answer."""
    if isinstance(error, Exception):
        answer.set_exception(error)
    else:
        answer.set_exception(BackendUnavailable("the broker gave up the call; repeating it is safe"))
    # Mostly nobody waits for it.
    answer.exception()


def request_name(caller: str, request: str) -> Name:
    """Make the name of a request. Raises InvalidRequest if the caller's text cannot be a name."""
    if not 0 < len(request) <= LONGEST_NAME:
        raise InvalidRequest(f"a request id has 1 to {LONGEST_NAME} characters, not {len(request)}")
    return Name(caller, request)


def heard_names(text: str | None) -> list[str]:
    """Return the names of earlier requests whose answers have arrived. Raises InvalidRequest if there are too many."""
    names = text.split() if text else []
    if len(names) > MOST_HEARD:
        raise InvalidRequest(f"{len(names)} answers heard of at once: name at most {MOST_HEARD}")
    return names
