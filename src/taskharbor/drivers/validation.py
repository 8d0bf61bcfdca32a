"""Checks a call once, then passes it to the function or method of the driver.

Bounds are in the types of the fields, and decoding checks them. msgspec checks nothing when it converts a struct into its own
type, so a struct that Python code made is converted into a twin of its type. Texts are checked by columns, all values of a field
in a batch at once: blank names, NUL and lone surrogates are refused, because some store could not keep them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import chain
from types import ModuleType, NoneType, UnionType
from typing import Any, ClassVar, TypeAlias, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

from taskharbor.drivers import operations as op
from taskharbor.errors import InvalidRequest, field_error, shown
from taskharbor.jobs import LARGEST_PAYLOAD, LATEST, MAX_HEADERS_BYTES, JobRecord

A = TypeVar("A")
T = TypeVar("T")
C = TypeVar("C", bound=op.Operation[Any])
Column: TypeAlias = Callable[[Sequence[Any]], None]
"""Checks the texts in many values of one type."""

_PORTION = 500


class Dispatcher:
    """The base class of `Driver`: finds the function or method for a call."""

    functions: ClassVar[Mapping[type[op.Operation[Any]], Callable[..., Any]]] = {}
    """The functions that carry out calls, by the type of call. `_apply` calls them. For any other call the driver has a method
    `_name`, with the name of the call: `async def _reserve(self, call: Reserve) -> list[JobRecord]`."""

    def run(self, call: op.Operation[A]) -> Coroutine[Any, Any, A]:
        """Carry out a checked call. All calls enter a driver here, so a wrapper can override this one method for all of them."""
        if call.batch is not None and not getattr(call, call.batch):
            return _nothing()
        function = self.functions.get(type(call))
        if function is not None:
            return self._apply(function, call)
        method: Callable[..., Coroutine[Any, Any, A]] | None = getattr(self, f"_{call.name}", None)
        if method is None:
            raise NotImplementedError(f"{type(self).__name__} does not carry out {call.name}")
        return method(call)

    def _apply(self, function: Callable[..., Any], call: op.Operation[A]) -> Coroutine[Any, Any, A]:
        """Call one of `functions` with the store of this handle and the call."""
        raise NotImplementedError


def functions_of(*modules: ModuleType) -> dict[type[op.Operation[Any]], Callable[..., Any]]:
    """Return the functions of some modules that have the name of a call."""
    names = [(name, call) for name, call in op.OPERATIONS.items()]
    return {call: vars(module)[name] for module in modules for name, call in names if name in vars(module)}


async def _nothing() -> Any:
    """Answer a batch without items."""
    return []


def check(call: C) -> C:
    """Return the same call if all its values are allowed. Raises InvalidRequest."""
    try:
        # bytes are listed as built in, so that they are not read from base64 texts.
        msgspec.convert(call, _twin(type(call)), from_attributes=True, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise field_error(call, str(error)) from None
    check_texts(call)
    return call


def listed(name: str, values: Iterable[T]) -> list[T]:
    """Return an argument of a call as a list. A single text is not taken for a list of its characters. Raises InvalidRequest."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} {shown(name, values)}: expected a list")
    return list(values)


def check_records(records: Sequence[JobRecord]) -> None:
    """Refuse records that no driver stores. Raises InvalidRequest."""
    # In portions, so that the intermediate values of the checks stay in the processor's cache.
    for start in range(0, len(records), _PORTION):
        try:
            check(op.Enqueue(list(records[start : start + _PORTION]), 0))
        except InvalidRequest:
            check(op.Enqueue(list(records), 0))  # For the place in the whole batch.
            raise


def check_texts(call: op.Operation[Any]) -> None:
    """Refuse values that decoding accepts: texts that some store cannot keep, large headers, fields that contradict each
    other."""
    _texts_of(type(call))([call])
    match call:
        case op.Reserve() | op.ExtendLease() if call.lease_for > LATEST - call.now:
            raise InvalidRequest(
                f"lease_for {call.lease_for}: the lease would end after the last instant; at most {LATEST - call.now}"
            )
        case op.ReadBlobs() | op.PublishBlobs() if len(set(call.names)) < len(call.names):
            raise InvalidRequest("names: a blob is named twice; a call reads each once")
        case op.Configure(queue=queue, settings=settings):
            if call.declares and settings.declaration is None:
                raise InvalidRequest("declares without a declaration: give the text that stands for it")
            if settings.max_inflight == 0:
                raise InvalidRequest("max_inflight 0: at least 1, or none; to stop a queue, pause it")
            if settings.failure_queue == queue:
                raise InvalidRequest(
                    f"queue {queue!r} cannot be its own failure queue: a failing job would never end"
                )


@functools.cache
def _twin(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Make a type with the same fields and bounds."""
    fields = [(field.name, _twin_type(field.type)) for field in given_fields(kind)]
    return msgspec.defstruct(kind.__name__, fields, gc=False, tag=kind.__struct_config__.tag)


def given_fields(kind: type[msgspec.Struct]) -> Sequence[msgspec.structs.FieldInfo]:
    """Return the fields that a caller decides on."""
    fields = msgspec.structs.fields(kind)
    if kind is not JobRecord:
        return fields
    # The store alone decides on `state` and the fields after it, whatever the given record says.
    return fields[: [field.name for field in fields].index("state")]


def _twin_type(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _twin(kind)
    arguments = get_args(kind)
    if get_origin(kind) is list:
        return list[_twin_type(arguments[0])]  # type: ignore[misc]
    if isinstance(kind, UnionType):
        return functools.reduce(operator.or_, map(_twin_type, arguments))
    return kind


@functools.cache
def _texts_of(kind: type[msgspec.Struct]) -> Column:
    """Make the checks of a struct's fields, for many structs of the kind."""
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
        return functools.partial(_check_kinds, columns) if columns else None
    return None


def _check_kinds(columns: dict[type | None, Column], values: Sequence[Any]) -> None:
    for kind in set(map(type, values)) - {NoneType}:
        # A value of another type is refused by any column of structs.
        check_column = columns.get(kind) or next(iter(columns.values()))
        check_column([value for value in values if type(value) is kind])


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
    if field == "payload" and (longest := max(map(len, values), default=0)) > LARGEST_PAYLOAD:
        raise InvalidRequest(
            f"payload of {longest} bytes: at most {LARGEST_PAYLOAD} are accepted; store the data elsewhere and enqueue a "
            "reference to it"
        )


def _check_headers(field: str, values: Sequence[dict[str, str]]) -> None:
    for headers in filter(None, values):
        texts = [*headers, *headers.values()]
        _check_column(field, True, texts)
        size = sum(len(text.encode()) for text in texts)
        if size > MAX_HEADERS_BYTES:
            raise InvalidRequest(f"{field} of {size} bytes: at most {MAX_HEADERS_BYTES} are accepted")
