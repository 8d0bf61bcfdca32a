"""A handle on the reference model: the contract's calls, and waiting for work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self, TypeVar, cast

from taskharbor.clock import Clock, SystemClock
from taskharbor.drivers.contract import Capabilities, Driver
from taskharbor.drivers.operations import Operation, Wait
from taskharbor.drivers.waiting import Look, wait
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import Micros
from taskharbor_testkit.model.operating import Model

A = TypeVar("A")


class ModelDriver(Driver):
    """A handle on a model. Its clones share the model."""

    capabilities: ClassVar[Capabilities] = Capabilities(durable=False, multi_process=False)
    trusts_notifications = False

    def __init__(self, model: Model | None = None, *, clock: Clock | None = None) -> None:
        self.model = Model() if model is None else model
        self._clock = SystemClock() if clock is None else clock
        self.notifications = self.model.notifications

    def clone(self) -> Self:
        return type(self)(self.model, clock=self._clock)

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
        """The model has a method of the same name, with the same parameters, for every call but `wait`."""
        if isinstance(call, Wait):
            return cast("A", await wait(self, call))
        with self.model.lock:
            arguments = {name: getattr(call, name) for name in call.__struct_fields__}
            answer: A = getattr(self.model, call.name)(**arguments)
            return answer

    # -- the source of `waiting.wait` ---------------------------------------------------------------------

    def listen(self, queues: Sequence[str]) -> None:
        return None

    async def look(self, queues: Sequence[str], version: str | None, since: Micros) -> Look:
        with self.model.lock:
            versions = [self.model.versions.get(queue, 0) for queue in queues]
            return Look.at(versions, version, self.model.next_due(queues, since))
