"""The jobs of a chaos run."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeAlias

from taskharbor.jobs import JobRecord
from taskharbor.requests import new_ids

Contents: TypeAlias = Mapping[tuple[str, str], int]
"""How many jobs of which type go to which queue."""

LIMIT, BATCH, KEYS = 5, 100, 150
LASTING = ("plain", "lasting")
CONTENTS: Contents = {
    ("plain", "quick"): 15_000,
    ("plain", "slow"): 800,
    ("mixed", "flaky"): 1_500,
    ("mixed", "doomed"): 300,
    ("mixed", "quick"): 1_400,
    ("limited", "quick"): 1_000,
    ("keyed", "quick"): 1_500,
}


def fewer(times: int) -> Contents:
    """The same mixture for a store that takes longer over each job."""
    return {kind: count // times for kind, count in CONTENTS.items()}


def make_job(job_id: str, queue: str, type: str, priority: int = 0) -> JobRecord:
    """A record without times."""
    return JobRecord(
        id=job_id,
        type=type,
        queue=queue,
        payload=b"null",
        run_at_us=0,
        created_at_us=0,
        # Every kill may cost a job a stall: only what is doomed is to die.
        max_attempts=3 if type == "doomed" else 100,
        backoff_min_us=10_000,
        backoff_max_us=100_000,
        priority=priority,
    )


def make_batches(rng: random.Random, contents: Contents = CONTENTS) -> list[list[JobRecord]]:
    """Records without times, in batches of one queue each, well shuffled."""
    per_queue: dict[str, list[JobRecord]] = defaultdict(list)
    for (queue, type), count in contents.items():
        for job_id in new_ids(count):
            record = make_job(job_id, queue, type, rng.choice((0, 0, 0, 5)))
            if queue == "keyed":
                record.key = f"key-{rng.randrange(KEYS)}"
            per_queue[queue].append(record)
    batches: list[list[JobRecord]] = []
    for queued in per_queue.values():
        rng.shuffle(queued)
        batches += [queued[start : start + BATCH] for start in range(0, len(queued), BATCH)]
    rng.shuffle(batches)
    return batches
