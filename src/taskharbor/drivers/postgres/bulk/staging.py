"""A chunk of new jobs as values for the statement `stage`: rows for those of each queue, without and with idempotency keys, and
one for all that have a key.

Jobs that differ in nothing but their payloads are one row with single values for all of them, and get their ids when they are
published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from taskharbor.alike import AlikeJobs
from taskharbor.drivers.postgres import arrays
from taskharbor.drivers.postgres.bulk.ends import Ends
from taskharbor.drivers.postgres.rows import (
    backoff_column,
    codec_column,
    flag_number,
    given_columns,
    headers_text,
    to_json,
)
from taskharbor.jobs import DEFAULT_BACKOFF_MAX, DEFAULT_BACKOFF_MIN, JobRecord

_DEFAULTS = ("json", 0, 0, DEFAULT_BACKOFF_MIN, DEFAULT_BACKOFF_MAX, None)


def chunk_values(jobs: Sequence[JobRecord]) -> Iterator[list[Any]]:
    """Each list begins with `queue` and ends with `payloads`."""
    if isinstance(jobs, AlikeJobs) and jobs.template.key is None and jobs.template.idempotency_key is None:
        yield [
            jobs.template.queue,
            len(jobs),
            True,
            None,
            *_columns([jobs.template]),
            None,
            *_no_rules(jobs.payloads),
        ]
        return
    plain: dict[tuple[str, bool], list[JobRecord]] = {}
    keyed: list[JobRecord] = []
    for job in jobs:
        if job.key is not None:
            keyed.append(job)
        else:
            plain.setdefault((job.queue, job.idempotency_key is not None), []).append(job)
    for (queue, is_idempotent), some in plain.items():
        ids = [job.id for job in some]
        keys = arrays.escaped_texts([job.idempotency_key for job in some]) if is_idempotent else None
        payloads = [job.payload for job in some]
        yield [queue, len(some), False, arrays.text_array(ids), *_columns(some), keys, *_no_rules(payloads)]
    if keyed:
        rules = to_json([given_columns(job) for job in keyed])
        payloads = [job.payload for job in keyed]
        locks = len({(job.queue, job.key) for job in keyed})
        yield [None, len(keyed), False, None, *_NO_COLUMNS, rules, locks, *_joined(payloads)]


def _columns(jobs: Sequence[JobRecord]) -> list[str | None]:
    """types, run_ats, created_ats, ranks, max_attempts, headers and the rare ones."""
    return [
        arrays.text_array([job.type for job in jobs]),
        arrays.int_array([job.run_at_us for job in jobs]),
        arrays.int_array([job.created_at_us for job in jobs]),
        arrays.int_array([-job.priority for job in jobs]),
        arrays.int_array([job.max_attempts for job in jobs]),
        arrays.escaped_texts([headers_text(job.headers) for job in jobs])
        if any(job.headers for job in jobs)
        else None,
        *_rare_columns(jobs),
    ]


_NO_COLUMNS = [None] * 13


def _rare_columns(jobs: Sequence[JobRecord]) -> list[str | None]:
    """codecs, timeouts_us, max_stalls, backoff_mins, backoff_maxs, flags. None stands for the default in all of them."""
    seen = {
        (job.codec, job.timeout_us, job.max_stalls, job.backoff_min_us, job.backoff_max_us, job.update)
        for job in jobs
    }
    if seen == {_DEFAULTS}:
        return [None] * 6
    return [
        arrays.escaped_texts([codec_column(job.codec) for job in jobs]),
        _numbers([job.timeout_us or None for job in jobs]),
        _numbers([job.max_stalls or None for job in jobs]),
        _numbers([backoff_column(job.backoff_min_us, DEFAULT_BACKOFF_MIN) for job in jobs]),
        _numbers([backoff_column(job.backoff_max_us, DEFAULT_BACKOFF_MAX) for job in jobs]),
        _numbers([flag_number(job.update) for job in jobs]),
    ]


def _numbers(values: Iterable[int | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def _no_rules(payloads: Sequence[bytes]) -> tuple[None, None, Ends, bytes]:
    return None, None, *_joined(payloads)


def _joined(payloads: Sequence[bytes]) -> tuple[Ends, bytes]:
    return Ends(payloads), b"".join(payloads)
