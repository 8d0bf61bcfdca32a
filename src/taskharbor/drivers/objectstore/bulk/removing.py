"""Removing jobs that have ended, by their ids, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

from taskharbor.drivers.objectstore.archived import Brought, QueueState
from taskharbor.drivers.objectstore.folding import wall_clock
from taskharbor.drivers.objectstore.queue_cell import QueueCell
from taskharbor.drivers.objectstore.store import OpenStore
from taskharbor.errors import JobError, JobNotFound
from taskharbor.jobs import JobState


async def remove(store: OpenStore, job_ids: Sequence[str]) -> list[JobState | JobError]:
    """The state each was in, or why it stays."""
    ids = list(job_ids)

    async def ask(cell: QueueCell, at: list[int]) -> list[JobState | JobError]:
        own = [ids[one] for one in at]

        def step(state: QueueState, brought: Brought) -> list[JobState | JobError]:
            return state.remove_ended(own, wall_clock(), brought)

        return await cell.change(step)

    answers = await store.by_home(ids, ask, lambda answer: isinstance(answer, JobNotFound))
    return [JobNotFound(job_id) if one is None else one for job_id, one in zip(ids, answers, strict=True)]
