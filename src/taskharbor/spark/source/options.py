"""What a reader was told by `.option(...)`, checked before anything runs. No message repeats the URL: it may hold a password."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TypeAlias, cast

import msgspec

from taskharbor.bulk.tables import SCHEMAS, Selection, Table
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import JobState, Micros, to_micros

StartingOffsets: TypeAlias = Literal["earliest", "latest"]

_BATCH = ("url", "table", "queue", "type", "state", "since", "until", "parallelism")
_STREAM = (*_BATCH, "startingOffsets", "maxRowsPerBatch")
_DEFAULT_PARALLELISM: dict[Table, int] = {
    "attempts": 8,
    # Jobs move between tables while they are read: one part is one snapshot.
    "jobs": 1,
    "queues": 1,
}


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    table: Table
    selection: Selection
    parallelism: int
    starting: StartingOffsets = "earliest"
    rows_per_batch: int | None = None

    def __repr__(self) -> str:
        return (
            f"ReadOptions(table={self.table!r}, selection={self.selection!r}, parallelism={self.parallelism})"
        )


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """For `spark.read`, and for as much of `spark.readStream` as Spark asks before it says which of the two it is."""
    _check_names(given, _STREAM)
    url = given.get("url", "")
    if "://" not in url:
        raise InvalidRequest(
            'say which store: .option("url", "postgresql://user@host/database") or sqlite:////path/to/jobs.db'
        )
    if not connect(url).capabilities.multi_process:
        raise InvalidRequest(
            "this store lives in the memory of one process, and Spark reads in others: use one they all can reach, like "
            "sqlite:////path/to/jobs.db or postgresql://host/database"
        )
    table = given.get("table", "attempts")
    if table not in SCHEMAS:
        raise InvalidRequest(f"table={table!r}: choose one of {', '.join(SCHEMAS)}")
    selection = Selection(
        queue=given.get("queue"),
        type=given.get("type"),
        state=_state(given.get("state")),
        since_us=_instant("since", given.get("since")),
        until_us=_instant("until", given.get("until")),
    )
    if table == "queues" and selection != Selection(queue=selection.queue):
        raise InvalidRequest("the table queues can be restricted by the option queue, and by nothing else")
    starting = given.get("startingOffsets", "earliest")
    if starting not in ("earliest", "latest"):
        raise InvalidRequest(f"startingOffsets={starting!r}: choose earliest or latest")
    return ReadOptions(
        url=url,
        table=table,
        selection=selection,
        parallelism=_count("parallelism", given.get("parallelism")) or _DEFAULT_PARALLELISM[table],
        starting=cast(StartingOffsets, starting),
        rows_per_batch=_count("maxRowsPerBatch", given.get("maxRowsPerBatch")),
    )


def stream_options(given: Mapping[str, str]) -> ReadOptions:
    options = read_options(given)
    if options.table != "attempts":
        raise InvalidRequest(
            f"the table {options.table} cannot be read as a stream, because its rows change: read the stream of attempts, "
            "or read it anew with spark.read"
        )
    return options


def _check_names(given: Mapping[str, str], known: tuple[str, ...]) -> None:
    names = {name.lower() for name in known}
    unknown = sorted(name for name in given if name.lower() not in names)
    if unknown:
        raise InvalidRequest(
            f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}: known are {', '.join(known)}"
        )


def _state(value: str | None) -> JobState | None:
    if value is None:
        return None
    try:
        return JobState(value)
    except ValueError:
        raise InvalidRequest(f"state={value!r}: choose one of {', '.join(JobState)}") from None


def _instant(name: str, value: str | None) -> Micros | None:
    if value is None:
        return None
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidRequest(
            f"{name}={value!r} is not a time: write it like 2026-01-31 or 2026-01-31T12:00:00+00:00"
        ) from None
    return to_micros(when if when.tzinfo is not None else when.replace(tzinfo=UTC))


def _count(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isdecimal() and 0 < int(value) < 2**31):
        raise InvalidRequest(f"{name}={value!r}: give a whole number above zero")
    return int(value)
