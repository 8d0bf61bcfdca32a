"""A job as it is stored: its number and all fields of its record, as one array.

The names of the fields are written once beside the jobs, so that a version of TaskHarbor whose records have other fields
can read them, and can tell that it must.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple

from taskharbor.jobs import JobRecord

FIELDS: tuple[str, ...] = JobRecord.__struct_fields__

_Stored: type[Any] = msgspec.defstruct(
    "_Stored",
    [("number", int), *((field.name, field.type) for field in msgspec.structs.fields(JobRecord))],
    array_like=True,
    gc=False,
)
_encode = msgspec.msgpack.Encoder().encode
_decode_current: Callable[[bytes], Any] = msgspec.msgpack.Decoder(_Stored).decode
_decode_any = msgspec.msgpack.Decoder(list[Any]).decode


def encode_job(number: int, record: JobRecord) -> bytes:
    return _encode((number, *astuple(record)))


def job_decoder(fields: Sequence[str]) -> Callable[[bytes], tuple[int, JobRecord]]:
    """For jobs that were written with these fields."""
    if tuple(fields) == FIELDS:
        return _current_job

    def other_job(piece: bytes) -> tuple[int, JobRecord]:
        number, *values = _decode_any(piece)
        known = {name: value for name, value in zip(fields, values, strict=True) if name in FIELDS}
        return number, msgspec.convert(known, JobRecord)

    return other_job


def _current_job(piece: bytes) -> tuple[int, JobRecord]:
    stored = _decode_current(piece)
    return stored.number, msgspec.convert(stored, JobRecord, from_attributes=True)
