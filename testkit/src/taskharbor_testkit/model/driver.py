"""A handle on the reference model: the contract's calls, and waiting for work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Self, TypeVar

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers.contract import Capabilities, Driver
from taskharbor.drivers.operations import Operation
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Micros
from taskharbor_testkit.model.bulk import BulkModel
from taskharbor_testkit.model.store import Model

A = TypeVar("A")


class ModelDriver(Driver):
    """A handle on a model. Its clones share the model."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=False, multi_process=False)

    def __init__(
        self, model: Model | None = None, *, clock: Clock | None = None, bulk: BulkModel | None = None
    ) -> None:
        self.model = Model() if model is None else model
        self._clock = SystemClock() if clock is None else clock
        self._bulk = BulkModel(self.model) if bulk is None else bulk
        self._seen: dict[str, int] = {}
        """Per queue, the version that the last `wait` of this handle returned at."""

    def clone(self) -> Self:
        return type(self)(self.model, clock=self._clock, bulk=self._bulk)

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise InvalidRequest("the reference model has no URL: construct it")

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def time(self) -> Micros:
        return self._clock.now()

    async def run(self, call: Operation[A]) -> A:
        """The model has a method of the same name, with the same parameters, for every call."""
        with self.model.lock:
            carry_out = getattr(self.model, call.name, None) or getattr(self._bulk, call.name)
            answer: A = carry_out(**{name: getattr(call, name) for name in call.__struct_fields__})
            return answer

    async def wait(self, queues: Sequence[str], *, now: Micros, timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        waiter = (queues, lambda: loop.call_soon_threadsafe(changed.set))
        with self.model.lock:
            before = {queue: self._seen.get(queue, 0) for queue in queues}
            due = self.model.next_due(queues, now)
            is_late = self.versions(queues) != before
            self.model.waiters.append(waiter)
        comes_due = due is not None and due - now <= timeout * SECOND
        seconds = (due - now) / SECOND if due is not None and comes_due else timeout
        try:
            # A wait that returns at once must still let other tasks run.
            await (asyncio.sleep(0) if is_late else _wait_for(changed, max(seconds, 0.0)))
        finally:
            with self.model.lock:
                self.model.waiters.remove(waiter)
        # A wake-up may have come while the time-out fired.
        with self.model.lock:
            after = self.versions(queues)
        self._seen.update(after)
        return comes_due or after != before

    def versions(self, queues: Sequence[str]) -> dict[str, int]:
        return {queue: self.model.versions.get(queue, 0) for queue in queues}


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
