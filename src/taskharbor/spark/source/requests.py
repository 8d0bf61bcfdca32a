"""Rows of a DataFrame -> jobs: which column is what, and how a row's payload is made.

A column named like a field of `JobRequest` is that field; a null in it, or no such column, means the option of the same name, or
the default. The column `payload` holds the payload: text that is JSON, bytes that are encoded already, or anything else, which is
encoded. Without it, all columns that are no fields become an object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from taskharbor.codec import JSON
from taskharbor.errors import CodecError, InvalidRequest, TaskHarborError
from taskharbor.jobs import JobRecord, JobRequest, Micros, UpdateFlags
from taskharbor.requests import EncodedPayload, RecordBuilder

PAYLOAD = "payload"
SHOWN_CHARACTERS = 200
# Distinct combinations of fields in a batch up to which rows are built together.
MOST_KINDS = 16

_encode_lines = msgspec.json.Encoder().encode_lines
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class RowRefused(InvalidRequest):
    """A row cannot be a job. No row of the write is published."""


def _number(value: Any) -> Any:
    """Spark's 1.5 is a decimal."""
    return float(value) if isinstance(value, Decimal) else value


def _headers(value: Any) -> Any:
    return _decode_headers(value) if isinstance(value, str) else dict(value)


def _flags(value: Any) -> Any:
    return UpdateFlags(**{name: one for name, one in value.items() if one is not None})


# Types that the values of columns must have, and what to give.
_KINDS: Final[dict[str, tuple[type, str]]] = {
    "run_at": (datetime, "a timestamp, such as to_timestamp(run_at)"),
    "update": (dict, "a struct with fields of UpdateFlags, such as struct('later' AS run_at)"),
}
# Columns that are fields.
FIELDS: Final = frozenset(JobRequest.__struct_fields__) - {PAYLOAD}
# Functions that turn Arrow's value into the field's, if the two differ.
_CONVERTERS: Final[dict[str, Callable[[Any], Any]]] = {
    "delay": _number,
    "timeout": _number,
    "update": _flags,
    "backoff": tuple,
    "headers": _headers,
}

# Fields that an option gives to all rows.
OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    **dict.fromkeys(("type", "queue", "codec"), str),
    **dict.fromkeys(("delay", "timeout"), float),
    **dict.fromkeys(("priority", "max_attempts", "max_stalls"), int),
    "run_at": datetime.fromisoformat,
    "headers": _decode_headers,
}


class RowsToJobs:
    """Turns rows into jobs. Made when the write is planned, used by its tasks."""

    def __init__(self, columns: Sequence[str], options: Mapping[str, str]) -> None:
        self._fields = [name for name in columns if name in FIELDS]
        others = [name for name in columns if name not in FIELDS and name != PAYLOAD]
        self._objects = None if PAYLOAD in columns else others
        if PAYLOAD in columns and others:
            raise InvalidRequest(
                f"the columns {', '.join(others)} are no fields of a job, and the payload is in the column {PAYLOAD}: "
                f"drop them, or drop {PAYLOAD} to make a payload of them"
            )
        self._defaults = {name: _option(name, options[name]) for name in OPTIONS if name in options}
        if "type" not in self._fields and "type" not in self._defaults:
            raise InvalidRequest(
                "of what type are these jobs? Add a column `type`, or .option('type', '...') for all rows"
            )
        # A wrong option is wrong for every row, so it is reported before any row is read.
        probe = {"type": "any"} | self._defaults
        RecordBuilder().build([JobRequest(**probe)], 0)

    def records(self, batch: pa.RecordBatch, builder: RecordBuilder, now: Micros) -> Sequence[JobRecord]:
        """Return the jobs of a batch, checked. Raises RowRefused for the first row that cannot be one."""
        try:
            return self._records(batch, builder, now)
        except (TaskHarborError, msgspec.MsgspecError, TypeError, ValueError) as error:
            if batch.num_rows == 1:
                raise RowRefused(f"a row cannot be a job: {error}. The row: {_shown(batch)}") from error
            # The refused row is found one by one. This is slow, and only done after an error.
            for number in range(batch.num_rows):
                self.records(batch.slice(number, 1), builder, now)
            raise InvalidRequest(f"these rows cannot be jobs: {error}") from error

    def _records(self, batch: pa.RecordBatch, builder: RecordBuilder, now: Micros) -> Sequence[JobRecord]:
        columns = [_values(batch.column(name)) for name in self._fields]
        rows: list[tuple[Any, ...]] = list(zip(*columns, strict=True)) if columns else [()] * batch.num_rows
        try:
            kinds_of_rows = set(rows)
        except TypeError:  # Headers, and the like, are no keys.
            kinds_of_rows = set()
        if not 1 <= len(kinds_of_rows) <= max(1, min(MOST_KINDS, len(rows) // 8)):
            fields = [self._row_fields(row) for row in rows]
            payloads = self._payloads(batch, builder, [_codec(one, builder) for one in fields])
            pairs = zip(payloads, fields, strict=True)
            requests = [JobRequest(payload=EncodedPayload(data), **one) for data, one in pairs]
            return builder.build(requests, now)
        # Most rows share their fields with many others: checked once for all of them.
        fields_of = {row: self._row_fields(row) for row in kinds_of_rows}
        codecs = {row: _codec(one, builder) for row, one in fields_of.items()}
        payloads = self._payloads(batch, builder, [codecs[row] for row in rows])
        if len(fields_of) == 1:
            return builder.alike(JobRequest(**fields_of[rows[0]]), payloads, now)
        made: dict[tuple[Any, ...], Iterator[JobRecord]] = {}
        for row, one in fields_of.items():
            its = [payload for payload, other in zip(payloads, rows, strict=True) if other == row]
            made[row] = iter(builder.build_like(JobRequest(**one), its, now))
        return [next(made[row]) for row in rows]

    def _row_fields(self, row: tuple[Any, ...]) -> dict[str, Any]:
        fields = dict(self._defaults)
        for name, value in zip(self._fields, row, strict=True):
            if value is not None:
                kind, wanted = _KINDS.get(name, (object, ""))
                if not isinstance(value, kind):
                    raise InvalidRequest(f"the column {name} holds {value!r}: give {wanted}")
                convert = _CONVERTERS.get(name)
                fields[name] = value if convert is None else convert(value)
                # A row's own time wins over the option for all rows.
                if name in _TIMES and _TIMES[name] not in self._fields:
                    fields.pop(_TIMES[name], None)
        if "type" not in fields:
            raise InvalidRequest("no type: the column `type` is null, and there is no option `type`")
        return fields

    def _payloads(self, batch: pa.RecordBatch, builder: RecordBuilder, codecs: Sequence[str]) -> list[bytes]:
        if JSON.name in codecs:
            for name in (PAYLOAD,) if self._objects is None else self._objects:
                _check_finite(batch.column(name))
        if self._objects is not None:
            columns = [_values(batch.column(name)) for name in self._objects]
            rows = _objects(self._objects, columns, batch.num_rows, are_json=set(codecs) == {JSON.name})
            return _encoded(rows, builder, codecs)
        column = batch.column(PAYLOAD)
        is_text = kinds.is_string(column.type) or kinds.is_large_string(column.type)
        if not is_text and not (kinds.is_binary(column.type) or kinds.is_large_binary(column.type)):
            return _encoded(_values(column), builder, codecs)
        given: list[bytes | None] = (column.cast(pa.large_binary()) if is_text else column).to_pylist()
        for payload, codec in zip(given, codecs, strict=True):
            if codec == JSON.name and payload is not None:
                try:
                    _check_json(payload)
                except msgspec.DecodeError as error:
                    raise CodecError(
                        f"the payload is no JSON ({error}): make it with to_json, or name the codec it is encoded by"
                    ) from None
            elif is_text and payload is not None:
                raise CodecError(f"a payload of codec {codec} is not text: give bytes")
        return [
            builder.codecs.get(codec).encode(None) if payload is None else payload
            for payload, codec in zip(given, codecs, strict=True)
        ]


_TIMES = {"run_at": "delay", "delay": "run_at"}


def _option(name: str, text: str) -> Any:
    try:
        return OPTIONS[name](text)
    except (ValueError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"option {name}={text!r}: {error}") from error


def _values(column: Any) -> list[Any]:
    values: list[Any] = column.to_pylist(maps_as_pydicts="lossy" if kinds.is_nested(column.type) else None)
    return values


def _check_finite(column: Any) -> None:
    """JSON would have a null for it without a word."""
    if kinds.is_floating(column.type):
        if pc.all(pc.is_finite(column)).as_py() is False:
            raise CodecError(
                "JSON has no NaN and no infinity: make them null, or name another codec, such as msgpack"
            )
    elif kinds.is_map(column.type):
        _check_finite(column.items)
    elif kinds.is_nested(column.type):
        for inner in column.flatten() if kinds.is_struct(column.type) else [column.flatten()]:
            _check_finite(inner)


def _codec(fields: Mapping[str, Any], builder: RecordBuilder) -> str:
    return fields.get("codec") or builder.defaults.codec


def _objects(names: Sequence[str], columns: list[list[Any]], count: int, *, are_json: bool) -> list[Any]:
    """Return rows as values that are encoded like `dict(zip(names, row))`."""
    if not names:
        return [{}] * count
    row_type = _row_type(tuple(names)) if are_json else None
    if row_type is not None:
        return list(map(row_type, *columns))
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


@functools.cache
def _row_type(names: tuple[str, ...]) -> type[msgspec.Struct] | None:
    """Make a struct type for rows, which costs a fraction of a dict. None if a name cannot be a field's in JSON."""
    fields = {f"field_{number}": name for number, name in enumerate(names)}
    try:
        return msgspec.defstruct("Row", list(fields), rename=fields, gc=False)
    except ValueError:
        return None


def _encoded(values: Sequence[Any], builder: RecordBuilder, codecs: Sequence[str]) -> list[bytes]:
    if set(codecs) == {JSON.name}:
        # One call for all of them: JSON has no line ends of its own.
        return _encode_lines(values).split(b"\n")[:-1]
    return [builder.codecs.get(codec).encode(value) for value, codec in zip(values, codecs, strict=True)]


def _shown(row: pa.RecordBatch) -> str:
    """Return one row for an error message. Long values are cut."""
    texts = {name: repr(_values(row.column(name))[0]) for name in row.schema.names}
    most = SHOWN_CHARACTERS
    return ", ".join(
        f"{name}={text[:most]}" + (f"... ({len(text)} characters)" if len(text) > most else "")
        for name, text in texts.items()
    )
