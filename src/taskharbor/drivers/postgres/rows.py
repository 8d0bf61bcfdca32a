"""Statements, and records to columns and back. NULL stands for a default, so that most jobs are short rows and short answers.

Columns have the names of the records' fields, without `_us` for instants, but for `rank` (minus the priority, so that an index in
one direction serves) and `flags`. So the lists of columns are made of the records.

A batch goes to the server as one array literal per column, made by `join`: a library that adapts every element of a list by
itself costs more than the round trip.

Statements come from `sql/*.sql`: one file per family of operations, each statement under a `-- name:` line. Values are `$1`,
`$2`, ... `$schema` stands for the schema that holds the tables: every name is qualified, because behind a pooler a session's
search path belongs to whoever used it last. `/*name*/` stands for a list of columns that is made here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any, Final

import msgspec

from taskharbor.drivers.records import STATE_NUMBERS, STATES, loaded
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros, UpdateFlags, UpdateRunAt

READY: Final = STATE_NUMBERS[JobState.READY]

SECRET_LENGTH: Final = 24

_RUN_AT: tuple[UpdateRunAt, ...] = ("no", "yes", "later", "earlier")
_FLAGS = {
    number: UpdateFlags(
        bool(number & 1), _RUN_AT[number >> 3 & 3], bool(number & 2), bool(number & 4), number < 0
    )
    for number in range(-32, 32)
}
_FLAG_NUMBERS = {flags: number for number, flags in _FLAGS.items()}

_encode = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\""})
_LONGEST = 2**63 - 1


def _column(field: str) -> str:
    return {"priority": "-rank", "update": "flags"}.get(
        field, field.removesuffix("_us") if field.endswith("_at_us") else field
    )


_JOB_FIELDS = JobRecord.__struct_fields__
_CLAIMED_ALWAYS = (
    "id", "type", "payload", "priority", "run_at_us", "created_at_us", "max_attempts", "attempts", "stalls", "fence",
    "expires_at_us", "reserved_at_us",
)  # fmt: skip
_CLAIMED_RARE = (
    "codec", "headers", "timeout_us", "key", "update", "idempotency_key", "max_stalls", "backoff_min_us", "backoff_max_us",
    "last_error", "failed_at_us",
)  # fmt: skip
"""Columns of a claimed job that are never NULL, and those that may be. The claimer knows the rest."""
_NOTHING_RARE = [None] * len(_CLAIMED_RARE)

# -- statements ----------------------------------------------------------------------------------------------------

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_LISTS = {
    "attempt": ", ".join(["xid", *map(_column, Attempt.__struct_fields__)]),
    "claimed": ", ".join(["seq", *map(_column, _CLAIMED_ALWAYS), *map(_column, _CLAIMED_RARE)]),
    "job": ", ".join(["seq", *map(_column, _JOB_FIELDS)]),
    # The fields of a `job_batch`, the first values of a statement.
    "batch": ", ".join(f"${n}" for n in range(1, 18)),
}


@cache
def load(family: str, schema: str) -> dict[str, str]:
    """The statements of one file by name, for one schema."""
    file = files(__package__) / "sql" / f"{family}.sql"
    text = file.read_text("utf-8").replace("$schema", quoted(schema))
    for name, columns in _LISTS.items():
        text = text.replace(f"/*{name}*/", columns)
    parts = _NAME.split(text)[1:]
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def call(function: str, schema: str, count: int) -> str:
    """Return a call of a function of the store with `count` values. Their types are those of its parameters."""
    values = ", ".join(f"${n}" for n in range(1, count + 1))
    return f"SELECT * FROM {quoted(schema)}.{function}({values})"  # noqa: S608


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


# -- to the server --------------------------------------------------------------------------------------------

_GIVEN = [
    (field.name, _column(field.name).removeprefix("-"), field.default)
    for field in msgspec.structs.fields(JobRecord)[: _JOB_FIELDS.index("state")]
    if field.name != "payload"
]
_ALWAYS = ("queue", "priority", "max_attempts")
"""Columns of `jobs` that have no NULL for the default."""


def rule_values(records: Sequence[JobRecord]) -> list[Any]:
    """Return the arguments of `enqueue_by_rules`: columns that are not defaults, and the payloads."""
    columns = [
        {
            column: stored_value(field, value)
            for field, column, default in _GIVEN
            if ((value := getattr(record, field)) != default and value != {}) or field in _ALWAYS
        }
        for record in records
    ]
    payloads = [record.payload for record in records]
    return [to_json(columns), b"".join(payloads), ends(payloads)]


def stored_value(field: str, value: Any) -> Any:
    match field:
        case "priority":
            return -value
        case "headers":
            return to_json(value) if value else None
        case "update":
            return None if value is None else _FLAG_NUMBERS[value]
    return value


def to_json(value: Any) -> str:
    return _encode(value).decode()


def escaped_texts(values: Iterable[str | None]) -> str:
    """Return an array of texts that may be NULL, or have quotes and backslashes."""
    return "{" + ",".join(["NULL" if one is None else f'"{one.translate(_ESCAPED)}"' for one in values]) + "}"


def text_array(values: Sequence[str]) -> str:
    """Quotes and backslashes are rare in ids and types, so they are searched for once and escaped only if one was found."""
    joined = "".join(values)
    if '"' in joined or "\\" in joined:
        return escaped_texts(values)
    return '{"' + '","'.join(values) + '"}' if values else "{}"


def int_array(values: Iterable[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def ends(payloads: Sequence[bytes]) -> str:
    """Return 0, and the end of each payload in the joined payloads."""
    return int_array(accumulate(map(len, payloads), initial=0))


def token_parts(token: str) -> tuple[str, int]:
    """Return the secret of the claim and the job's number. With the number, settling needs no search by id. It proves nothing: id
    and secret are still compared."""
    try:
        seq = int(token[SECRET_LENGTH:], 16)
    except ValueError:
        seq = -1
    # `int` also reads texts that no driver has written: with blanks, underscores or capitals.
    is_one = 0 <= seq <= _LONGEST and token[SECRET_LENGTH:] == f"{seq:x}"
    return token[:SECRET_LENGTH], seq if is_one else -1


# -- from the server ------------------------------------------------------------------------------------------


def leased_job(row: tuple[Any, ...], queue: str, secret: str, worker: str) -> JobRecord:
    """Make a record of a row of `claim`. Written out by hand: a loop over the names would cost a worker twice as much for every
    job."""
    (
        seq, job_id, type_, payload, priority, run_at, created_at, max_attempts, attempts, stalls, fence, expires_at, reserved_at,
        *rare,
    ) = row  # fmt: skip
    job = JobRecord(
        id=job_id, type=type_, queue=queue, payload=payload, priority=priority, run_at_us=run_at, created_at_us=created_at,
        max_attempts=max_attempts, state=JobState.INFLIGHT, attempts=attempts, stalls=stalls, fence=fence,
        token=f"{secret}{seq:x}", worker=worker, expires_at_us=expires_at, reserved_at_us=reserved_at,
    )  # fmt: skip
    if rare != _NOTHING_RARE:
        for name, value in _decoded(_CLAIMED_RARE, rare).items():
            setattr(job, name, value)
    return job


def job_record(row: tuple[Any, ...], now: Micros) -> JobRecord:
    """Make a record of a row of the view `job_records`. Raises JobDamaged."""
    return loaded(row[1], _job_record, row, now)


def _job_record(row: tuple[Any, ...], now: Micros) -> JobRecord:
    fields = _decoded(_JOB_FIELDS, row[1:])
    if (token := fields.get("token")) is not None:
        fields["token"] = f"{token}{row[0]:x}"
    state = fields["state"]
    if state <= READY:
        state = int(fields["run_at_us"] <= now)
    return JobRecord(**{**fields, "state": STATES[state]})


def _decoded(names: Iterable[str], row: Sequence[Any]) -> dict[str, Any]:
    """Return the values that are not NULL, by field."""
    fields = {name: value for name, value in zip(names, row, strict=False) if value is not None}
    if "headers" in fields:
        fields["headers"] = _decode_headers(fields["headers"])
    if "update" in fields:
        fields["update"] = _FLAGS[fields["update"]]
    return fields


def are_headers(text: str | None) -> bool:
    """True if stored headers can be read."""
    try:
        _decode_headers(text or "{}")
    except ValueError:
        return False
    return True
