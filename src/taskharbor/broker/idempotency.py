"""Answers that may not have arrived: who asks again under the same name gets the same answer, and nothing happens twice.

A client that lost an answer cannot know whether its call took effect. Enqueues carry ids and ends are final, so most calls could
simply be made again; but a second reserve would leave the jobs of the first to wait for the end of their leases.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec

from taskharbor.broker.request_response import ClientGone
from taskharbor.errors import BackendUnavailable, InvalidRequest

KEEP_SECONDS = 60.0
MAX_BYTES = 32 * 1_048_576
MAX_ANSWERS = 20_000
LONGEST_NAME = 64
MOST_HEARD = 64


# The name of a caller, and the name that it gives to one of its calls.
RequestName: TypeAlias = tuple[str, str]


class _Kept(msgspec.Struct):
    operation: str
    answer: asyncio.Future[Any]
    at: float
    size: int = 0


class Replays:
    """The kept answers. Used from the server's loop. They are bounded in time, in bytes and in number."""

    def __init__(self) -> None:
        # Kept answers in the order of their requests.
        self._kept: dict[RequestName, _Kept] = {}
        self._bytes = 0

    async def once(
        self,
        name: RequestName,
        operation: str,
        make: Callable[[], Awaitable[Any]],
        still_holds: Callable[[Any], bool] = lambda answer: True,
    ) -> tuple[Any, bool]:
        """Return the answer that was made under this name, also by a call that is still under way, if it still holds; else make
        one now. Also returns whether the answer was made for an earlier call. Raises InvalidRequest if the caller's text cannot
        be a name."""
        length = len(name[1])
        if not 0 < length <= LONGEST_NAME:
            raise InvalidRequest(f"a request id has 1 to {LONGEST_NAME} characters, not {length}")
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
                    return answer, True
                self.forget(name)
        loop = asyncio.get_running_loop()
        kept = self._kept[name] = _Kept(operation, loop.create_future(), loop.time())
        try:
            answer = await make()
        except BaseException as error:
            del self._kept[name]
            # The error of callers that wait for the same answer. Mostly there is none.
            given_up = BackendUnavailable("the broker gave up the call; repeating it is safe")
            kept.answer.set_exception(error if isinstance(error, Exception) else given_up)
            kept.answer.exception()
            raise
        kept.answer.set_result(answer)
        return answer, False

    def weigh(self, name: RequestName, size: int) -> None:
        """Note the size of the answer of this name. Makes room by forgetting the oldest."""
        if (kept := self._kept.get(name)) is not None:
            self._bytes += size - kept.size
            kept.size = size
        too_old = asyncio.get_running_loop().time() - KEEP_SECONDS
        while ended := next((one for one in self._kept.items() if one[1].answer.done()), None):
            oldest, kept = ended
            if self._bytes <= MAX_BYTES and len(self._kept) <= MAX_ANSWERS and kept.at > too_old:
                break
            self.forget(oldest)

    def replace(self, name: RequestName, answer: Any) -> None:
        """Replace the answer for a repeated call of this name."""
        if (kept := self._kept.get(name)) is not None:
            kept.answer = asyncio.get_running_loop().create_future()
            kept.answer.set_result(answer)

    def forget(self, name: RequestName) -> None:
        """Forget the answer: a repeated call of this name is a new call."""
        if (kept := self._kept.get(name)) is not None and kept.answer.done():
            del self._kept[name]
            self._bytes -= kept.size

    def heard(self, caller: str, text: str) -> None:
        """Note that the answers of these requests have arrived. Raises InvalidRequest if there are too many."""
        requests = text.split()
        if len(requests) > MOST_HEARD:
            raise InvalidRequest(f"{len(requests)} answers heard of at once: name at most {MOST_HEARD}")
        for request in requests:
            self.forget((caller, request))
