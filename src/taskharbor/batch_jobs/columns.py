"""Payloads of many jobs as Arrow columns. If a value does not fit, only its own row is rejected."""

from __future__ import annotations

import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from taskharbor.jobs import JobRecord

_PLAIN: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bytes: pa.binary(),
    date: pa.date32(),
    datetime: pa.timestamp("us", tz="UTC"),
}
_OF_THE_JOB: dict[str, tuple[pa.DataType, Callable[[JobRecord], Any]]] = {
    "job_id": (pa.string(), lambda record: record.id),
    "queue": (pa.string(), lambda record: record.queue),
    "key": (pa.string(), lambda record: record.key),
    "attempt": (pa.int64(), lambda record: record.attempts + record.stalls + 1),
    "max_attempts": (pa.int64(), lambda record: record.max_attempts),
    "fence": (pa.int64(), lambda record: record.fence),
    "created_at": (_PLAIN[datetime], lambda record: record.created_at_us),
    "run_at": (_PLAIN[datetime], lambda record: record.run_at_us),
}
# The first array imports pandas, if it is there. That takes a third of a second, in which no job is to be leased.
pa.array([None])
_MISFITS = (pa.ArrowException, TypeError, ValueError, OverflowError)


def arrow_type(hint: Any) -> pa.DataType | None:
    """Return the column type for a type hint; None if Arrow has to look at the values."""
    origin = typing.get_origin(hint)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return arrow_type(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        rest = [one for one in typing.get_args(hint) if one is not type(None)]
        return arrow_type(rest[0]) if len(rest) == 1 else None
    if origin is list:
        inner = arrow_type(typing.get_args(hint)[0])
        return None if inner is None else pa.list_(inner)
    return _PLAIN.get(hint)


def columns_of_rows(
    rows: Sequence[Any], fields: Mapping[str, Any]
) -> tuple[dict[str, pa.Array], dict[int, str]]:
    """Return the columns, by the type hints of their fields; or no columns, and the reason for each row that does not fit."""
    columns: dict[str, pa.Array] = {}
    for name, hint in fields.items():
        values = [row.get(name) if isinstance(row, dict) else getattr(row, name) for row in rows]
        kind = None if hint is None else arrow_type(hint)
        try:
            plain = values if kind is not None else [msgspec.to_builtins(value) for value in values]
            columns[name] = pa.array(plain, kind)
        except _MISFITS as misfit:
            misfits = _declared_misfits(values, kind) if kind is not None else _odd_ones_out(values)
            # Each row fits alone, but they do not fit together. Nobody can say which one is wrong, so all are rejected.
            found = misfits or dict.fromkeys(range(len(rows)), str(misfit))
            return {}, {index: f"the payload does not fit: {name}: {why}" for index, why in found.items()}
    return columns, {}


def columns_of_jobs(names: Sequence[str], records: Sequence[JobRecord]) -> dict[str, pa.Array]:
    """Return the columns about the jobs themselves that a handler asks for."""
    return {
        name: pa.array([read(record) for record in records], kind)
        for name in names
        for kind, read in (_OF_THE_JOB[name],)
    }


def as_table(columns: dict[str, pa.Array], count: int) -> pa.Table:
    if columns:
        return pa.table(columns)
    # A table without columns still has one row per job.
    return pa.table({"": pa.nulls(count)}).select([])


def _declared_misfits(values: Sequence[Any], kind: pa.DataType) -> dict[int, str]:
    found: dict[int, str] = {}
    for index, value in enumerate(values):
        try:
            pa.array([value], kind)
        except _MISFITS as misfit:
            found[index] = str(misfit)
    return found


def _odd_ones_out(values: Sequence[Any]) -> dict[int, str]:
    """Find the rows that differ from most others in an undeclared field."""
    kinds = [_kind_of(value) for value in values]
    counts = Counter(kind for kind in kinds if kind not in ("null", None))
    usual = counts.most_common(1)[0][0] if counts else "null"
    return {
        index: f"{kind or 'not a value Arrow knows'} where most rows of the batch have {usual}"
        for index, kind in enumerate(kinds)
        if kind not in ("null", usual)
    }


def _kind_of(value: Any) -> str | None:
    try:
        return str(pa.infer_type([msgspec.to_builtins(value)]))
    except _MISFITS:
        return None
