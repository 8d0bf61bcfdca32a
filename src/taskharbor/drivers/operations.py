"""The calls of the driver contract as data: one struct per call. It has the bounds of its fields, the scope that a broker
requires, whether it changes the store, and its answer.

`Driver` makes these structs and a driver carries them out. The HTTP driver sends them as they are. A broker reads, checks and
runs them. `Driver`'s methods of the same names say what each call does.

Bounds are in the types of the fields, and decoding checks them. `validation.check` checks structs that Python code made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import Meta

from taskharbor.drivers import records as rec
from taskharbor.errors import JobError
from taskharbor.jobs import Attempt, Count, Instant, JobRecord, JobState, Lease, Name, Now, Text

A_co = TypeVar("A_co", covariant=True)
Call = TypeVar("Call", bound="type[Operation[Any]]")

Scope: TypeAlias = Literal["read", "produce", "bulk", "work", "admin"]


class Operation(msgspec.Struct, Generic[A_co]):
    """One call of the contract. `A_co` is the type of its answer."""

    name: ClassVar[str]
    """The method of `Driver` that makes this call."""
    scope: ClassVar[Scope]
    changes: ClassVar[bool]
    """True if it changes the store, so that a repeated try must be recognised."""
    answer: ClassVar[Any]
    """The type of the answer."""
    batch: ClassVar[str | None]
    """The field with the jobs of the call, if each job has an answer in its place."""


OPERATIONS: dict[str, type[Operation[Any]]] = {}
"""Every call by its name."""


def operation(
    scope: Scope, *, changes: bool = False, has_batch: bool = False, name: str | None = None
) -> Callable[[Call], Call]:
    """Register a call under a name, by default the class's. `has_batch`: its first field lists jobs or names, and each has an
    answer in its place."""

    def register(call: Call) -> Call:
        call.name = name or re.sub(r"(?<!^)(?=[A-Z])", "_", call.__name__).lower()
        call.scope = scope
        call.changes = changes
        (call.answer,) = get_args(call.__orig_bases__[0])  # type: ignore[attr-defined]
        call.batch = call.__struct_fields__[0] if has_batch else None
        OPERATIONS[call.name] = call
        return call

    return register


# -- producing and working ----------------------------------------------------------------------------------


@operation("produce", changes=True, has_batch=True)
class Enqueue(Operation[list[rec.Enqueued]]):
    records: list[JobRecord]
    now: Now
    new_ids: bool = False


@operation("work", changes=True)
class Reserve(Operation[list[JobRecord]]):
    queue: Name
    limit: Count
    lease_for: rec.LeaseTime
    now: Now
    worker: Name
    types: list[Name] | None = None


@operation("work", changes=True, has_batch=True)
class ExtendLease(Operation[list[Lease | JobError]]):
    extensions: list[rec.Extension]
    lease_for: rec.LeaseTime
    now: Now


@operation("work", changes=True, has_batch=True)
class Settle(Operation[list[JobError | None]]):
    settlements: list[rec.Settlement]
    now: Now


@operation("work", changes=True)
class Reclaim(Operation[int]):
    now: Now
    queue: Name | None = None
    limit: Count = 1000


# -- operating ----------------------------------------------------------------------------------------------


@operation("admin", changes=True, has_batch=True, name="cancel")
class CancelJobs(Operation[list[JobState | JobError]]):
    job_ids: list[Name]
    now: Now
    only_waiting: bool = False


@operation("admin", changes=True, has_batch=True)
class CancelKeys(Operation[list[int]]):
    keys: list[Name]
    queue: Name
    now: Now
    only_waiting: bool = False


@operation("admin", changes=True, has_batch=True)
class Requeue(Operation[list[JobState | JobError]]):
    job_ids: list[Name]
    now: Now
    run_at_us: Instant | None = None
    keep_counts: bool = False


@operation("admin", changes=True)
class Purge(Operation[int]):
    selection: rec.JobFilter
    limit: Count = 1000


# Workers sweep, so this needs no scope of an operator: it removes only what is due by a queue's own settings.
@operation("work", changes=True)
class Prune(Operation[int]):
    now: Now
    limit: Count = 1000


@operation("admin", changes=True)
class Configure(Operation[None]):
    queue: Name
    settings: rec.QueueSettings
    now: Now
    fields: list[rec.SettingsField] | None = None
    """The settings that change. None: all."""
    declares: bool = False
    """True for a declaration in code. It changes nothing if the queue's `declaration` is this one already."""


# -- inspection ---------------------------------------------------------------------------------------------


@operation("read")
class Settings(Operation[rec.QueueSettings]):
    queue: Name


@operation("read", has_batch=True)
class Get(Operation[list[JobRecord | None]]):
    job_ids: list[Name]
    now: Now


@operation("read")
class ListJobs(Operation[rec.Page]):
    selection: rec.JobFilter
    now: Now
    limit: rec.PageSize = 100
    cursor: Text | None = None


@operation("read")
class Stats(Operation[list[rec.QueueStats]]):
    now: Now
    queue: Name | None = None


@operation("read")
class ReadAttempts(Operation[rec.AttemptPage]):
    after: Text | None = None
    limit: rec.PageSize = 1000


@operation("read")
class JobAttempts(Operation[list[Attempt]]):
    job_id: Name


# -- in bulk ------------------------------------------------------------------------------------------------


@operation("read")
class LogStreams(Operation[rec.LogState]):
    pass


@operation("read")
class ReadLog(Operation[rec.LogPage]):
    stream: Text
    after: rec.LogPlace
    until: rec.LogPlace
    limit: rec.PageSize = 1000


@operation("read")
class SplitLog(Operation[list[int]]):
    stream: Text
    after: rec.LogPlace
    until: rec.LogPlace
    rows: rec.PageSize


@operation("read")
class SplitJobs(Operation[list[rec.JobShare]]):
    queue: Name | None
    parts: Annotated[int, Meta(ge=1, le=10_000)]


@operation("admin", changes=True, has_batch=True)
class Remove(Operation[list[JobState | JobError]]):
    job_ids: list[Name]


@operation("bulk", changes=True)
class PutBlob(Operation[bool]):
    blob: rec.BlobName
    data: bytes
    swaps: bool = False
    """True if the blob must hold the expected bytes."""
    expected: bytes | None = None


@operation("bulk", has_batch=True)
class ReadBlobs(Operation[list[bytes | None]]):
    names: rec.BlobNames


@operation("bulk")
class ListBlobs(Operation[list[str]]):
    folder: rec.BlobName


@operation("bulk", changes=True, has_batch=True)
class DropBlobs(Operation[list[None]]):
    names: rec.BlobNames


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
    names: rec.BlobNames
    now: Now


@operation("work")
class Wait(Operation[rec.Woken]):
    queues: Annotated[list[Name], Meta(min_length=1, max_length=256)]
    now: Now
    timeout: rec.Seconds
    seen: Text | None = None
    """The text that the caller's last wait for these queues returned."""


# -- between a client and its broker ------------------------------------------------------------------------


@operation("read")
class Hello(Operation[rec.Greeting]):
    pass


@operation("read")
class Time(Operation[int]):
    pass
