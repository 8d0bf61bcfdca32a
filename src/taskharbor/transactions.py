"""Enqueues within a transaction of the caller. The job is stored if and only if that transaction commits.

    with Session(engine) as session, session.begin():
        session.add(order)
        session.flush()
        send_receipt.within(session).enqueue(order.id)

Requests are checked and filled in as for every other enqueue. Then they go into the caller's transaction instead of one of the
driver's own. The driver says which transactions it can join.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec

from taskharbor.drivers.contract import Enqueued, JoinedAsyncTransaction, JoinedTransaction
from taskharbor.jobs import JobRecord, JobRequest, Micros
from taskharbor.requests import RecordBuilder

if TYPE_CHECKING:
    from taskharbor.client import JobHandle
    from taskharbor.harbor import JobType

P = ParamSpec("P")
R = TypeVar("R")
Calls: TypeAlias = Iterable[tuple[Any, ...] | list[Any] | Mapping[str, Any]]
"""Arguments of many calls, each by position or by name. No type can be made of a function's parameters for them."""

CHUNK = 1000
"""Records per statement."""


class SyncTransaction(Protocol):
    """A synchronous transaction, for type checkers: a connection or session that commits and rolls back."""

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class AsyncTransaction(Protocol):
    """An asynchronous transaction, for type checkers."""

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...


def is_async(transaction: object) -> bool:
    return inspect.iscoroutinefunction(getattr(transaction, "commit", None))


class ClientWithin(msgspec.Struct, frozen=True):
    """The client's enqueues as part of a transaction. `client.within(transaction)` returns it."""

    _joined: JoinedTransaction
    _builder: RecordBuilder
    _now: Callable[[], Micros]

    def enqueue(self, request: JobRequest) -> Enqueued:
        """Enqueue one job."""
        return self.enqueue_many([request])[0]

    def enqueue_many(self, requests: Iterable[JobRequest]) -> list[Enqueued]:
        """Enqueue any number of jobs, with a statement for every thousand. All are checked before the first is sent."""
        asked, now = list(requests), self._now()
        parts = _parts(self._builder.build(asked, now))
        return [one for part in parts for one in self._joined.enqueue(part, now=now)]


class AsyncClientWithin(msgspec.Struct, frozen=True):
    """`ClientWithin` for asynchronous transactions."""

    _joined: JoinedAsyncTransaction
    _builder: RecordBuilder
    _now: Callable[[], Awaitable[Micros]]

    async def enqueue(self, request: JobRequest) -> Enqueued:
        """Enqueue one job."""
        return (await self.enqueue_many([request]))[0]

    async def enqueue_many(self, requests: Iterable[JobRequest]) -> list[Enqueued]:
        """Enqueue any number of jobs, with a statement for every thousand. All are checked before the first is sent."""
        asked, now = list(requests), await self._now()
        parts = _parts(self._builder.build(asked, now))
        return [one for part in parts for one in await self._joined.enqueue(part, now=now)]


class JobWithin(msgspec.Struct, Generic[P, R], frozen=True):
    """A declared job's enqueues as part of a transaction. `job.within(transaction)` returns it."""

    _job_type: JobType[P, R]
    _client: ClientWithin

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue the job with the arguments of its function."""
        accepted = self._client.enqueue(self._job_type.request(*args, **kwargs))
        return self._job_type._handles([accepted])[0]

    def enqueue_many(self, calls: Calls) -> list[JobHandle[R]]:
        """Enqueue one job per item. A tuple holds positional arguments, a mapping named ones."""
        return self._job_type._handles(self._client.enqueue_many(self._job_type._requests(calls)))


class AsyncJobWithin(msgspec.Struct, Generic[P, R], frozen=True):
    """`JobWithin` for asynchronous transactions."""

    _job_type: JobType[P, R]
    _client: AsyncClientWithin

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue the job with the arguments of its function."""
        accepted = await self._client.enqueue(self._job_type.request(*args, **kwargs))
        return self._job_type._handles([accepted])[0]

    async def enqueue_many(self, calls: Calls) -> list[JobHandle[R]]:
        """Enqueue one job per item. A tuple holds positional arguments, a mapping named ones."""
        return self._job_type._handles(await self._client.enqueue_many(self._job_type._requests(calls)))


def _parts(records: Sequence[JobRecord]) -> Iterator[Sequence[JobRecord]]:
    return (records[start : start + CHUNK] for start in range(0, len(records), CHUNK))
