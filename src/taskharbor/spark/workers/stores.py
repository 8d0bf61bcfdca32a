"""The store as the driver of a run sees it: named for executors elsewhere, and counted for the progress."""

from __future__ import annotations

import os

from taskharbor.client import Client
from taskharbor.jobs import JobState

_WORK_STATES = (JobState.READY, JobState.SCHEDULED, JobState.BLOCKED)


def absolute_url(url: str) -> str:
    """An SQLite file named from this folder, named from the root: executors stand elsewhere."""
    scheme, mark, rest = url.partition("://")
    if scheme != "sqlite" or not rest.startswith("/") or rest.startswith("//"):
        return url
    path, question, options = rest[1:].partition("?")
    return f"{scheme}{mark}/{os.path.abspath(path)}{question}{options}"


def look(client: Client, queues: list[str]) -> tuple[int, int, int]:
    """Jobs that ever ended, that wait, that are under way."""
    ended = waiting = inflight = 0
    for queue in queues:
        for stats in client.stats(queue):
            ended += stats.done_total + stats.dead_total + stats.cancelled_total
            waiting += sum(stats.counts[state] for state in _WORK_STATES)
            inflight += stats.counts[JobState.INFLIGHT]
    return ended, waiting, inflight
