"""Base of drivers that pass every call of the contract to one method.

The reference model and the simulated network both stand behind it, and this is the only place in the testkit that lists
the contract's calls.
"""

from __future__ import annotations

import abc
from typing import Any, Self

from taskharbor.drivers.contract import Driver
from taskharbor.errors import InvalidRequest


def _forward(call: str) -> Any:
    async def forward(self: ForwardingDriver, *args: Any, **kwargs: Any) -> Any:
        return await self.forward(call, args, kwargs)

    return forward


class ForwardingDriver(Driver):
    """A driver without a connection of its own. `wait` and `clone` are left to the subclass."""

    @abc.abstractmethod
    async def forward(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out one call of the contract, given by its name and arguments."""

    @classmethod
    def from_url(cls, url: str) -> Self:
        raise InvalidRequest(f"{cls.__name__} has no URL: construct it")

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    time = _forward("time")
    enqueue = _forward("enqueue")
    reserve = _forward("reserve")
    extend_lease = _forward("extend_lease")
    settle = _forward("settle")
    reclaim = _forward("reclaim")
    cancel = _forward("cancel")
    requeue = _forward("requeue")
    purge = _forward("purge")
    prune = _forward("prune")
    get = _forward("get")
    list_jobs = _forward("list_jobs")
    stats = _forward("stats")
    configure = _forward("configure")
    settings = _forward("settings")
    read_attempts = _forward("read_attempts")
    job_attempts = _forward("job_attempts")
