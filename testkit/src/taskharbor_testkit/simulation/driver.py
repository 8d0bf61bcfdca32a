"""A process's driver: the contract's calls, sent over the simulated network."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Self, TypeVar, cast

from taskharbor.drivers.contract import Driver, Woken
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.operations import Operation, Time, Wait
from taskharbor.errors import BackendUnavailable
from taskharbor.jobs import Micros
from taskharbor_testkit.simulation.network import Network
from taskharbor_testkit.simulation.process import Process

A = TypeVar("A")


class SimulatedDriver(Driver):
    def __init__(self, network: Network, process: Process, waiting: MemoryDriver) -> None:
        self._network = network
        self._process = process
        self._waiting = waiting

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise NotImplementedError("a simulated driver has no URL")

    def clone(self) -> Self:
        return type(self)(self._network, self._process, self._waiting.clone())

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def time(self) -> Micros:
        return await self._network.call(self._process, Time())

    def run(self, call: Operation[A]) -> Coroutine[Any, Any, A]:
        if isinstance(call, Wait):
            return cast("Coroutine[Any, Any, A]", self._wait(call))
        return self._network.call(self._process, call)

    async def _wait(self, call: Wait) -> Woken:
        if self._network.weather.is_out:
            raise BackendUnavailable("wait: no answer")
        return await self._waiting.run(call)
