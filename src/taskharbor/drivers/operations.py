"""The calls of the driver contract as data: one struct per call, with the bounds of its fields, the scope that a broker asks of
the caller, whether it changes the store, and its answer.

`Driver` makes these and a driver carries them out. The HTTP driver sends them as they are; a broker reads, checks and runs them.
`Driver`'s methods of the same names say what each call does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from taskharbor.drivers.records import (
    AttemptPage,
    Capabilities,
    Enqueued,
    Extension,
    JobFilter,
    JobShare,
    LogPage,
    LogState,
    Page,
    QueueSettings,
    QueueStats,
    Settlement,
    Woken,
)
from taskharbor.errors import InvalidRequest, JobError
from taskharbor.jobs import LATEST, Attempt, Count, Instant, JobRecord, JobState, Lease, Micros, Name, Text

A_co = TypeVar("A_co", covariant=True)
Call = TypeVar("Call", bound="type[Operation[Any]]")

Scope: TypeAlias = Literal["read", "produce", "bulk", "work", "admin"]
LeaseTime: TypeAlias = Annotated[Micros, Meta(ge=1, le=LATEST)]
PageSize: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
LogPlace: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
BlobName: TypeAlias = Annotated[str, Meta(pattern=r"\A(writes|staging(/[a-z0-9-]{1,64}){0,3})\Z")]
"""The record of bulk writes, or below the folder of staged jobs: no other object of a store can be named."""
BlobNames: TypeAlias = Annotated[list[BlobName], Meta(max_length=10_000)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=86_400)]


class Operation(msgspec.Struct, Generic[A_co]):
    """One call of the contract. `A_co` is its answer."""

    name: ClassVar[str]
    """The method of `Driver` that makes this call."""
    method: ClassVar[str]
    """The method that carries it out in a driver that has one for each call."""
    scope: ClassVar[Scope]
    changes: ClassVar[bool]
    """Whether it changes the store, so that it matters that a repeated try is recognised as such."""
    answer: ClassVar[Any]
    """The type of the answer."""
    batch: ClassVar[str | None]
    """The field with the jobs of the call, where each is answered in its place."""

    def check(self) -> None:
        """Refuse what no single field shows. Raises InvalidRequest."""


OPERATIONS: dict[str, type[Operation[Any]]] = {}
"""Every call by its name."""


def operation(scope: Scope, *, changes: bool = False) -> Callable[[Call], Call]:
    def register(call: Call) -> Call:
        call.name = re.sub(r"(?<!^)(?=[A-Z])", "_", call.__name__).lower()
        call.method = f"_{call.name}"
        call.scope = scope
        call.changes = changes
        (call.answer,) = get_args(call.__orig_bases__[0])  # type: ignore[attr-defined]
        first = next(iter(msgspec.structs.fields(call)), None)
        kind = None if first is None else first.type
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        call.batch = first.name if first is not None and get_origin(kind) is list else None
        OPERATIONS[call.name] = call
        return call

    return register


def by_fields(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a call's fields, in their order, as a function of the call. What comes before the call is passed on."""
    return lambda *given: function(*given[:-1], *msgspec.structs.astuple(given[-1]))


def _check_lease(call: Reserve | ExtendLease) -> None:
    longest = LATEST - call.now
    if call.lease_for > longest:
        raise InvalidRequest(
            f"lease_for {call.lease_for}: the lease would end after the last instant; at most {longest}"
        )


def _check_names(call: ReadBlobs | PublishBlobs) -> None:
    if len(set(call.names)) < len(call.names):
        raise InvalidRequest("names: a blob is named twice; a call reads each once")


# -- producing and working ----------------------------------------------------------------------------------


@operation("produce", changes=True)
class Enqueue(Operation[list[Enqueued]]):
    records: list[JobRecord]
    now: Instant
    new_ids: bool = False


@operation("work", changes=True)
class Reserve(Operation[list[JobRecord]]):
    queue: Name
    limit: Count
    lease_for: LeaseTime
    now: Instant
    worker: Name
    types: list[Name] | None = None
    check = _check_lease


@operation("work", changes=True)
class ExtendLease(Operation[list[Lease | JobError]]):
    extensions: list[Extension]
    lease_for: LeaseTime
    now: Instant
    check = _check_lease


@operation("work", changes=True)
class Settle(Operation[list[JobError | None]]):
    settlements: list[Settlement]
    now: Instant


@operation("work", changes=True)
class Reclaim(Operation[int]):
    now: Instant
    queue: Name | None = None
    limit: Count = 1000


# -- operating ----------------------------------------------------------------------------------------------


@operation("admin", changes=True)
class Cancel(Operation[list[JobState | JobError]]):
    job_ids: list[Name]
    now: Instant


@operation("admin", changes=True)
class Requeue(Operation[list[JobState | JobError]]):
    job_ids: list[Name]
    now: Instant


@operation("admin", changes=True)
class Purge(Operation[int]):
    selection: JobFilter
    limit: Count = 1000


# Workers sweep: what is due by a queue's own settings goes, and nothing else.
@operation("work", changes=True)
class Prune(Operation[int]):
    now: Instant
    limit: Count = 1000


@operation("admin", changes=True)
class Configure(Operation[None]):
    queue: Name
    settings: QueueSettings
    now: Instant

    def check(self) -> None:
        if self.settings.max_inflight == 0:
            raise InvalidRequest("max_inflight 0: at least 1, or none; to stop a queue, pause it")
        if self.settings.failure_queue == self.queue:
            raise InvalidRequest(
                f"queue {self.queue!r} cannot be its own failure queue: a failing job would never end"
            )


# -- inspection ---------------------------------------------------------------------------------------------


@operation("read")
class Settings(Operation[QueueSettings]):
    queue: Name


@operation("read")
class Get(Operation[list[JobRecord | None]]):
    job_ids: list[Name]
    now: Instant


@operation("read")
class ListJobs(Operation[Page]):
    selection: JobFilter
    now: Instant
    limit: PageSize = 100
    cursor: Text | None = None


@operation("read")
class Stats(Operation[list[QueueStats]]):
    now: Instant
    queue: Name | None = None


@operation("read")
class ReadAttempts(Operation[AttemptPage]):
    after: Text | None = None
    limit: PageSize = 1000


@operation("read")
class JobAttempts(Operation[list[Attempt]]):
    job_id: Name


# -- in bulk ------------------------------------------------------------------------------------------------


@operation("read")
class LogStreams(Operation[LogState]):
    pass


@operation("read")
class ReadLog(Operation[LogPage]):
    stream: Text
    after: LogPlace
    until: LogPlace
    limit: PageSize = 1000


@operation("read")
class SplitLog(Operation[list[int]]):
    stream: Text
    after: LogPlace
    until: LogPlace
    rows: PageSize


@operation("read")
class SplitJobs(Operation[list[JobShare]]):
    queue: Name | None
    parts: Annotated[int, Meta(ge=1, le=10_000)]


@operation("admin", changes=True)
class Remove(Operation[list[JobState | JobError]]):
    job_ids: list[Name]


@operation("bulk", changes=True)
class PutBlob(Operation[bool]):
    blob: BlobName
    data: bytes
    swaps: bool = False
    """Whether the blob must hold what is expected."""
    expected: bytes | None = None


@operation("bulk")
class ReadBlobs(Operation[list[bytes | None]]):
    names: BlobNames
    check = _check_names


@operation("bulk")
class ListBlobs(Operation[list[str]]):
    folder: BlobName


@operation("bulk", changes=True)
class DropBlobs(Operation[list[None]]):
    names: BlobNames


@operation("bulk")
class CheckRoom(Operation[None]):
    queue: Name
    size: Count


@operation("bulk", changes=True)
class PublishBlobs(Operation[dict[str, int]]):
    series: Name
    number: Annotated[int, Meta(ge=-1, le=2**53 - 1)]
    """-1: the write belongs to no series."""
    portion: Count
    names: BlobNames
    now: Instant
    check = _check_names


@operation("work")
class Wait(Operation[Woken]):
    queues: Annotated[list[Name], Meta(max_length=256)]
    now: Instant
    timeout: Seconds
    seen: Text | None = None
    """The text that the caller's last wait for these queues was told."""


# -- between a client and its broker ------------------------------------------------------------------------


class Greeting(msgspec.Struct, kw_only=True):
    """What a client must know of the broker and of the store behind it."""

    version: int
    capabilities: Capabilities
    max_batch: int
    """Jobs in one call, or on one page."""
    max_body: int
    """Bytes in one call."""
    max_wait: float
    """Seconds after which the broker ends a wait in any case."""


@operation("read")
class Hello(Operation[Greeting]):
    pass


@operation("read")
class Time(Operation[int]):
    pass
