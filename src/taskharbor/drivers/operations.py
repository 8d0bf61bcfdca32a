"""The calls of the driver contract as data: one struct per call, with the bounds of its fields, the scope that a broker asks of
the caller, whether it changes the store, and its answer.

`Driver` makes these and a driver carries them out. The HTTP driver sends them as they are; a broker reads, checks and runs them.
`Driver`'s methods of the same names say what each call does.

`check` checks calls and records, once for every driver, before any backend sees them. Bounds are in the types of the fields, and
decoding checks them. msgspec checks nothing when it converts a struct into its own type, so a struct that Python code made is
converted into a twin of its type. Texts are checked by columns, all values of a field in a batch at once: blank names, NUL and
lone surrogates are refused, which some store could not keep.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from itertools import chain
from types import UnionType
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, inspect

from taskharbor.drivers import records as rec
from taskharbor.errors import InvalidRequest, JobError, field_error, shown
from taskharbor.jobs import (
    LATEST,
    MAX_HEADERS_BYTES,
    Attempt,
    Count,
    Instant,
    JobRecord,
    JobState,
    Lease,
    Name,
    Text,
)

A_co = TypeVar("A_co", covariant=True)
Call = TypeVar("Call", bound="type[Operation[Any]]")
C = TypeVar("C", bound="Operation[Any]")
Column: TypeAlias = Callable[[Sequence[Any]], None]
"""Checks the texts in many values of one type."""

Scope: TypeAlias = Literal["read", "produce", "bulk", "work", "admin"]

_PORTION = 500


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
class Enqueue(Operation[list[rec.Enqueued]]):
    records: list[JobRecord]
    now: Instant
    new_ids: bool = False


@operation("work", changes=True)
class Reserve(Operation[list[JobRecord]]):
    queue: Name
    limit: Count
    lease_for: rec.LeaseTime
    now: Instant
    worker: Name
    types: list[Name] | None = None
    check = _check_lease


@operation("work", changes=True)
class ExtendLease(Operation[list[Lease | JobError]]):
    extensions: list[rec.Extension]
    lease_for: rec.LeaseTime
    now: Instant
    check = _check_lease


@operation("work", changes=True)
class Settle(Operation[list[JobError | None]]):
    settlements: list[rec.Settlement]
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
    selection: rec.JobFilter
    limit: Count = 1000


# Workers sweep: what is due by a queue's own settings goes, and nothing else.
@operation("work", changes=True)
class Prune(Operation[int]):
    now: Instant
    limit: Count = 1000


@operation("admin", changes=True)
class Configure(Operation[None]):
    queue: Name
    settings: rec.QueueSettings
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
class Settings(Operation[rec.QueueSettings]):
    queue: Name


@operation("read")
class Get(Operation[list[JobRecord | None]]):
    job_ids: list[Name]
    now: Instant


@operation("read")
class ListJobs(Operation[rec.Page]):
    selection: rec.JobFilter
    now: Instant
    limit: rec.PageSize = 100
    cursor: Text | None = None


@operation("read")
class Stats(Operation[list[rec.QueueStats]]):
    now: Instant
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


@operation("admin", changes=True)
class Remove(Operation[list[JobState | JobError]]):
    job_ids: list[Name]


@operation("bulk", changes=True)
class PutBlob(Operation[bool]):
    blob: rec.BlobName
    data: bytes
    swaps: bool = False
    """Whether the blob must hold what is expected."""
    expected: bytes | None = None


@operation("bulk")
class ReadBlobs(Operation[list[bytes | None]]):
    names: rec.BlobNames
    check = _check_names


@operation("bulk")
class ListBlobs(Operation[list[str]]):
    folder: rec.BlobName


@operation("bulk", changes=True)
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
    now: Instant
    check = _check_names


@operation("work")
class Wait(Operation[rec.Woken]):
    queues: Annotated[list[Name], Meta(max_length=256)]
    now: Instant
    timeout: rec.Seconds
    seen: Text | None = None
    """The text that the caller's last wait for these queues was told."""


# -- between a client and its broker ------------------------------------------------------------------------


@operation("read")
class Hello(Operation[rec.Greeting]):
    pass


@operation("read")
class Time(Operation[int]):
    pass


# -- checks -------------------------------------------------------------------------------------------------


def check(call: C) -> C:
    """The same call, where all its values are allowed. Raises InvalidRequest."""
    _check_bounds(call, _twin(type(call)))
    if isinstance(call, Settle):
        for kind in set(map(type, call.settlements)):
            same = Settle([one for one in call.settlements if type(one) is kind], 0)
            _check_bounds(same, _batch_twin(kind))
    check_texts(call)
    return call


def check_records(records: Sequence[JobRecord]) -> None:
    """Refuse records that no driver stores. Raises InvalidRequest."""
    # In portions: what a check makes of each record stays in the processor's cache.
    for start in range(0, len(records), _PORTION):
        check(Enqueue(list(records[start : start + _PORTION]), 0))


def check_texts(call: Operation[Any]) -> None:
    """Refuse what decoding lets pass: texts that some store cannot keep, large headers, fields that contradict each other."""
    _texts_of(type(call))([call])
    call.check()


def _check_bounds(made: msgspec.Struct, twin: type[msgspec.Struct]) -> None:
    try:
        # Listed as built in, bytes are not read from base64 texts.
        msgspec.convert(made, twin, from_attributes=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise field_error(made, str(error)) from None


@functools.cache
def _twin(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A type with the same fields and bounds."""
    fields = [(field.name, _twin_type(field.type)) for field in given_fields(kind)]
    return msgspec.defstruct(kind.__name__, fields, gc=False)


def given_fields(kind: type[msgspec.Struct]) -> Sequence[msgspec.structs.FieldInfo]:
    """Fields that a caller decides on."""
    fields = msgspec.structs.fields(kind)
    if kind is not JobRecord:
        return fields
    # The store alone decides on state and what follows, whatever the given record says.
    return fields[: [field.name for field in fields].index("state")]


@functools.cache
def _batch_twin(kind: type) -> type[msgspec.Struct]:
    if kind not in _SETTLEMENTS:
        raise InvalidRequest(f"{kind.__name__} is not a settlement")
    return msgspec.defstruct("Settle", [("settlements", list[_twin(kind)])])  # type: ignore[misc]


_SETTLEMENTS = get_args(get_args(msgspec.structs.fields(Settle)[0].type)[0])


def _twin_type(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _twin(kind)
    arguments = get_args(kind)
    if get_origin(kind) is list:
        # A union of structs has tags, which only encoded structs have: `check` converts one kind after the other.
        return list if set(get_args(arguments[0])) >= set(_SETTLEMENTS) else list[_twin_type(arguments[0])]  # type: ignore[misc]
    if isinstance(kind, UnionType):
        return functools.reduce(operator.or_, map(_twin_type, arguments))
    return kind


@functools.cache
def _texts_of(kind: type[msgspec.Struct]) -> Column:
    """Checks of a struct's fields, for many structs of the kind."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    types = {field.name: field.type for field in info.fields}
    columns = [
        (operator.attrgetter(field.name), column)
        for field in given_fields(kind)
        if (column := _column(field.name, types[field.name])) is not None
    ]

    def check_structs(values: Sequence[Any]) -> None:
        for other in set(map(type, values)) - {kind}:
            raise InvalidRequest(f"{other.__name__} where {kind.__name__} belongs")
        for get, check_column in columns:
            check_column(list(map(get, values)))

    return check_structs


def _column(field: str, kind: inspect.Type) -> Column | None:
    if isinstance(kind, inspect.StrType):
        return functools.partial(_check_column, field, not kind.min_length)
    if isinstance(kind, inspect.BytesType):
        return functools.partial(_check_bytes, field)
    if isinstance(kind, inspect.DictType):
        return functools.partial(_check_headers, field)
    if isinstance(kind, inspect.StructType):
        return _texts_of(kind.cls)
    if isinstance(kind, (inspect.ListType, inspect.FrozenSetType)):
        inner = _column(field, kind.item_type)
        return None if inner is None else lambda values: inner(list(chain.from_iterable(values)))
    if isinstance(kind, inspect.UnionType):
        columns = {
            getattr(one, "cls", None): column
            for one in kind.types
            if (column := _column(field, one)) is not None
        }
        return _union_column(columns) if columns else None
    return None


def _union_column(columns: dict[type | None, Column]) -> Column:
    if len(columns) == 1:
        (only,) = columns.values()
        return lambda values: only([value for value in values if value is not None])

    def check_kinds(values: Sequence[Any]) -> None:
        for kind in set(map(type, values)):
            columns[kind]([value for value in values if type(value) is kind])

    return check_kinds


def _check_column(field: str, may_be_blank: bool, texts: Sequence[str]) -> None:
    distinct = set(texts)
    joined = "".join(distinct)
    is_storable = "\0" not in joined and (joined.isascii() or _is_utf8(joined))
    if is_storable and (may_be_blank or not any(map(str.isspace, distinct))):
        return
    for text in texts:
        if "\0" in text or not _is_utf8(text) or (text.isspace() and not may_be_blank):
            raise InvalidRequest(
                f"{field} {shown(field, text)}: expected text without NUL and lone surrogates"
                + ("" if may_be_blank else ", and not only blanks")
            )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_bytes(field: str, values: Sequence[Any]) -> None:
    for other in set(map(type, values)) - {bytes}:
        raise InvalidRequest(f"{field}: expected `bytes`, got `{other.__name__}`")


def _check_headers(field: str, values: Sequence[dict[str, str]]) -> None:
    for headers in filter(None, values):
        texts = [*headers, *headers.values()]
        _check_column(field, True, texts)
        size = sum(len(text.encode()) for text in texts)
        if size > MAX_HEADERS_BYTES:
            raise InvalidRequest(f"{field} of {size} bytes: at most {MAX_HEADERS_BYTES} are accepted")
