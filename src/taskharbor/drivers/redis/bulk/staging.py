"""A chunk of new jobs as the values that are staged for each queue: four per job, as `lua/bulk_publish.lua` takes them."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.alike import AlikeJobs
from taskharbor.drivers.redis.packing import Word
from taskharbor.drivers.redis.stored import (
    encode,
    head_and_rest,
    place_in_line,
    stored_tail,
    stored_tails,
)
from taskharbor.ids import new_ids
from taskharbor.jobs import JobRecord


def chunk_values(jobs: Sequence[JobRecord]) -> dict[str, list[Word]]:
    """By queue, in order."""
    values: dict[str, list[Word]] = {}
    if isinstance(jobs, AlikeJobs) and _is_plain(jobs.template):
        return {jobs.template.queue: _alike(jobs)}
    for job in jobs:
        of_queue = values.setdefault(job.queue, [])
        if _is_plain(job):
            run_at = job.run_at_us
            of_queue += (job.id.encode(), place_in_line(job), run_at if run_at > 0 else 1, stored_tail(job))
        else:
            head, rest = head_and_rest(job)
            of_queue += (job.id.encode(), b"", encode(head), rest)
    return values


def _is_plain(job: JobRecord) -> bool:
    return job.key is None and job.idempotency_key is None


def _alike(jobs: AlikeJobs) -> list[Word]:
    template = jobs.template
    place, score = place_in_line(template), max(template.run_at_us, 1)
    ids = new_ids(len(jobs))
    values: list[Word] = []
    for job_id, tail in zip(ids, stored_tails(template, ids, jobs.payloads), strict=True):
        values += (job_id, place, score, tail)
    return values
