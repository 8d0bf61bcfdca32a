"""The demo's story: enqueue, two workers, a kill in the middle, until every job has ended; then the judgement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from taskharbor.client import Client
from taskharbor.demo.app import API_LIMIT, API_QUEUE
from taskharbor.demo.checks import Verdict, judge, recovery
from taskharbor.demo.crew import Crew
from taskharbor.demo.workload import Workload
from taskharbor.drivers.contract import JobFilter, QueueSettings
from taskharbor.jobs import Attempt, JobRecord, JobState, Micros

LEASE = 2.0
KILL_AT = 0.4
"""Which part of the jobs has ended when a worker is killed."""
PATIENCE = 180.0
WORKERS = ("worker-a", "worker-b")
_LOOK_EVERY = 0.1


class Progress(msgspec.Struct, frozen=True):
    """Where the run stands, for whoever draws it."""

    doing: str
    accepted: int
    counts: dict[JobState, int]

    @property
    def ended(self) -> int:
        return sum(count for state, count in self.counts.items() if state.is_terminal)


class Kill(msgspec.Struct, frozen=True):
    worker: str
    pid: int
    after: float
    """Seconds after the workers were started."""
    ended: int
    """Jobs that had ended by then."""
    held: list[str]
    at_us: Micros


class Outcome(msgspec.Struct, frozen=True):
    verdict: Verdict
    kill: Kill | None
    recovered: int
    recovered_after_us: Micros
    seconds: float
    requests: int
    """Enqueue calls, including those that met a waiting job of their key."""

    @property
    def well(self) -> bool:
        return self.verdict.well and self.kill is not None and self.recovered == len(self.kill.held)


class Demo:
    def __init__(self, folder: Path, work: Workload, show: Callable[[Progress], None]) -> None:
        self.url = f"sqlite:///{folder / 'demo.db'}"
        self._folder = folder
        self._work = work
        self._show = show
        self._client = Client(self.url)
        self._ids: dict[str, None] = {}
        self._kill: Kill | None = None

    def run(self) -> Outcome:
        started = time.monotonic()
        work = self._work
        try:
            self._client.configure(API_QUEUE, QueueSettings(max_inflight=API_LIMIT))
            self._say("enqueueing")
            for batch in self._client.enqueue_stream(work.first):
                self._ids.update((one.id, None) for one in batch)
                self._say("enqueueing")
            unwanted = [one.id for one in self._client.enqueue_many(work.unwanted)]
            self._ids.update(dict.fromkeys(unwanted))
            crew = Crew(self._folder, self.url, lease=LEASE, names=WORKERS)
            with crew.at_work():
                self._attend(crew, unwanted, time.monotonic())
            return self._judge(unwanted, time.monotonic() - started)
        finally:
            self._client.close()

    # -- while they work ------------------------------------------------------------------------------------

    def _attend(self, crew: Crew, unwanted: list[str], started: float) -> None:
        """Look, and act when its time has come, until nothing is left to do."""
        waves = iter(self._work.waves)
        more = True
        pause = threading.Event()
        total = len(self._work.first) + sum(map(len, self._work.waves))
        for progress in self._looks(started):
            crew.check()
            wave = next(waves, None) if progress.ended else []
            more = wave is not None
            if wave:
                self._ids.update((one.id, None) for one in self._client.enqueue_batch(wave))
            if unwanted and progress.ended >= total * KILL_AT / 2:
                self._client.cancel_many(unwanted)
                unwanted = []
            if self._kill is None and progress.ended >= total * KILL_AT:
                self._try_to_kill(crew, progress.ended, started)
            if not more and not unwanted and progress.ended >= len(self._ids):
                return
            pause.wait(_LOOK_EVERY)

    def _looks(self, started: float) -> Iterator[Progress]:
        while time.monotonic() - started < PATIENCE:
            doing = "two workers at work"
            if self._kill is not None:
                doing = f"{self._kill.worker} killed; one worker goes on"
            yield self._say(doing)

    def _say(self, doing: str) -> Progress:
        counts = dict.fromkeys(JobState, 0)
        for queue in self._client.stats():
            for state, count in queue.counts.items():
                counts[state] += count
        progress = Progress(doing, len(self._ids), counts)
        self._show(progress)
        return progress

    def _try_to_kill(self, crew: Crew, ended: int, started: float) -> None:
        """Kill the worker that holds most, if it still does when it is frozen; otherwise at the next look."""
        victim = max(crew.names, key=lambda name: len(self._held_by(name)))
        pid = crew.pid(victim)
        held = crew.kill_if(victim, lambda: self._held_by(victim))
        if held:
            after = time.monotonic() - started
            self._kill = Kill(victim, pid, after, ended, held, self._client.now())

    def _held_by(self, worker: str) -> list[str]:
        selection = JobFilter(worker=worker, states=frozenset({JobState.INFLIGHT}))
        return [job.id for job in self._client.list_jobs(selection, limit=1000).jobs]

    # -- afterwards -----------------------------------------------------------------------------------------

    def _judge(self, unwanted: list[str], seconds: float) -> Outcome:
        ids, kill = list(self._ids), self._kill
        attempts = list(self._attempts())
        verdict = judge(
            ids,
            self._records(ids),
            attempts,
            cancelled_by_us=frozenset(unwanted),
            limited_queue=API_QUEUE,
            limit=API_LIMIT,
        )
        recovered, after = recovery(kill.held, attempts, kill.at_us) if kill else (0, 0)
        work = self._work
        requests = len(work.first) + len(work.unwanted) + sum(map(len, work.waves))
        return Outcome(verdict, kill, recovered, after, seconds, requests)

    def _records(self, ids: list[str]) -> dict[str, JobRecord]:
        found: dict[str, JobRecord] = {}
        for start in range(0, len(ids), 500):
            records = self._client.get_many(ids[start : start + 500])
            found.update((record.id, record) for record in records if record is not None)
        return found

    def _attempts(self) -> Iterator[Attempt]:
        cursor: str | None = None
        while True:
            page = self._client.read_attempts(after=cursor)
            if not page.attempts:
                return
            yield from page.attempts
            cursor = page.cursor
