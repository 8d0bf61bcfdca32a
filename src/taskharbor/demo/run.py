"""A run of the demo: the jobs, two worker processes, a kill in the middle, and a verdict when every job has ended."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

import msgspec

from taskharbor.client import Client, chunks
from taskharbor.demo import app
from taskharbor.demo.app import API_LIMIT, API_QUEUE
from taskharbor.drivers.contract import JobFilter
from taskharbor.errors import TaskHarborError
from taskharbor.jobs import Attempt, JobRecord, JobRequest, JobState, Micros, Outcome

LEASE = 2.0
KILL_AT = 0.4
"""The share of jobs that have ended when a worker is killed."""
LONGEST_SECONDS = 180.0
STOP_SECONDS = 8.0
WORKERS = ("worker-a", "worker-b")
_LOOK_EVERY = 0.1

# -- the jobs: a seeded mix, and the expected end of each kind --------------------------------------------------------

MEANT_TO_END: dict[str, frozenset[JobState]] = {
    app.charge_card.type: frozenset({JobState.DEAD}),
    # Cancelled is how a job ends that was merged into another of its key.
    app.sync_account.type: frozenset({JobState.DONE, JobState.CANCELLED}),
}
"""Types not named here are meant to end done, unless the demo cancelled the job itself."""


class Workload(msgspec.Struct, frozen=True):
    """The jobs of the demo, and the times at which they are enqueued."""

    first: list[JobRequest]
    """Enqueued before the workers start."""
    waves: list[list[JobRequest]]
    """Enqueued while they run: keyed jobs, so that some meet a running one of their key."""
    unwanted: list[JobRequest]
    """Scheduled for tomorrow, and cancelled before that."""


def make_workload(jobs: int, seed: int) -> Workload:
    """`jobs` requests in all; the same for the same seed."""
    dice = random.Random(seed)
    ms = dice.randint

    def share(percent: float) -> range:
        return range(max(2, round(jobs * percent / 100)))

    def sync() -> JobRequest:
        keyed = app.sync_account.options(key=f"account-{dice.randrange(max(2, jobs // 60))}", priority=5)
        return keyed.request(ms(60, 200), fails_once=dice.random() < 0.3)

    keyed = [sync() for _ in share(10)]
    first = [
        *(app.resize_image.request(ms(20, 80)) for _ in share(15)),
        *(app.fetch_page.request(ms(10, 40), dice.randint(1, 3)) for _ in share(10)),
        *(app.charge_card.request(index % 2 == 0) for index in share(2)),
        *(app.remind.options(delay=dice.uniform(0.5, 4.0)).request(ms(10, 40)) for _ in share(8)),
        *(app.reset_password.request(ms(10, 40)) for _ in share(4)),
        *(app.call_api.request(ms(20, 60)) for _ in share(5)),
    ]
    unwanted = [app.remind.options(delay=86_400.0).request(1) for _ in share(1)]
    rest = max(0, jobs - len(first) - len(keyed) - len(unwanted))
    first += [app.send_mail.request(ms(40, 160)) for _ in range(rest)]
    dice.shuffle(first)
    size = max(1, len(keyed) // 8)
    waves = [keyed[start : start + size] for start in range(0, len(keyed), size)]
    return Workload(first=first, waves=waves, unwanted=unwanted)


# -- a run ------------------------------------------------------------------------------------------------------------


class Kill(msgspec.Struct, frozen=True):
    """The killed worker, the time of the kill, and the jobs that it held."""

    worker: str
    pid: int
    after: float
    """Seconds after the workers were started."""
    ended: int
    """Jobs that had ended by then."""
    held: list[str]
    at_us: Micros


class DemoVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a demo. `well` tells if they are as expected."""

    accepted: int
    done: int
    dead: int
    cancelled: int
    lost: int
    """Jobs that were accepted, and at the end are gone or in no terminal state."""
    doubled: int
    """Jobs that ended more than once, by the attempt log."""
    unlogged: int
    """Jobs in a terminal state without a row in the attempt log."""
    unexpected: int
    """Jobs that did not end as expected."""
    overlapping_leases: int
    """Pairs of leases of one job that were valid at the same time."""
    executions: int
    retried: int
    expired: int
    """Leases that expired."""
    w_limit: int
    w_max_overlap: int
    """Most leases of the limited queue that were valid at the same instant, by the attempt log."""

    @property
    def well(self) -> bool:
        """True if every job ended once and as expected."""
        sums_up = self.accepted == self.done + self.dead + self.cancelled
        faults = self.lost + self.doubled + self.unlogged + self.unexpected + self.overlapping_leases
        return sums_up and not faults and self.w_max_overlap <= self.w_limit


class DemoOutcome(msgspec.Struct, frozen=True):
    """The result of a demo."""

    verdict: DemoVerdict
    kill: Kill | None
    recovered: int
    recovered_after_us: Micros
    seconds: float
    requests: int
    """Enqueue calls, including those that met a waiting job of their key."""

    @property
    def well(self) -> bool:
        """True if the verdict is good and the jobs of the killed worker went on."""
        return self.verdict.well and self.kill is not None and self.recovered == len(self.kill.held)


class WorkerGone(TaskHarborError):
    """A worker of the demo ended by itself."""


class WorkerProcesses:
    """Worker processes by name. Their logs stand beside the database."""

    def __init__(self, folder: Path, url: str, names: Sequence[str] = WORKERS) -> None:
        self._folder = folder
        self._url = url
        self.names = names
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the workers, and stop them at the end of the block."""
        try:
            for name in self.names:
                self._processes[name] = self._start(name)
            yield
        finally:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                with process:
                    try:
                        process.wait(timeout=STOP_SECONDS)
                    except subprocess.TimeoutExpired:
                        process.kill()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "taskharbor", "worker", "taskharbor.demo.app:harbor"]
        command += [f"--url={self._url}", f"--name={name}", f"--lease={LEASE:g}", "--poll-interval=0.5"]
        # The hidden option ties the worker's life to ours: with the demo gone, its workers go too.
        command += ["--grace", "5", "--log-format", "json", "--supervised=-1"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TASKHARBOR")}
        with open(self._folder / f"{name}.log", "wb") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": log, "env": environment}
            return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **options)

    def kill_if(self, name: str, holds: Callable[[], list[str]]) -> tuple[int, list[str]]:
        """Kill the worker with SIGKILL while it holds jobs, and return its process id and these jobs. It is frozen first, so that
        they cannot change between the look and the kill. If it holds nothing, it is not killed."""
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        held = holds()
        if held:
            with self._processes.pop(name):
                process.kill()
        else:
            process.send_signal(signal.SIGCONT)
        return process.pid, held

    def check(self) -> None:
        """Raise if a worker ended that the demo did not kill."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                log = (self._folder / f"{name}.log").read_text("utf-8", errors="replace")
                said = " | ".join(log.strip().splitlines()[-3:]) or "nothing"
                raise WorkerGone(f"{name} ended with exit code {process.returncode}; its last words: {said}")


class Demo:
    """One run of the demo on a new SQLite file."""

    def __init__(self, folder: Path, work: Workload, show: Callable[[str, int, int], None]) -> None:
        """`show` is told what is being done, how many jobs have ended, and how many were accepted."""
        self.url = f"sqlite:///{folder / 'demo.db'}"
        self._folder = folder
        self._work = work
        self._show = show
        self._client = Client(self.url)
        self._ids: dict[str, None] = {}
        self._kill: Kill | None = None

    def run(self) -> DemoOutcome:
        """Enqueue, work, kill, and judge."""
        started = time.monotonic()
        work = self._work
        try:
            self._client.configure(API_QUEUE, create=True, max_inflight=API_LIMIT)
            self._say("enqueueing")
            for batch in self._client.enqueue_stream(work.first):
                self._ids.update((one.id, None) for one in batch)
                self._say("enqueueing")
            unwanted = [one.id for one in self._client.enqueue_many(work.unwanted)]
            self._ids.update(dict.fromkeys(unwanted))
            workers = WorkerProcesses(self._folder, self.url)
            with workers.running():
                self._attend(workers, unwanted, time.monotonic())
            return self._judge(unwanted, time.monotonic() - started)
        finally:
            self._client.close()

    # -- while they work ------------------------------------------------------------------------------------

    def _attend(self, workers: WorkerProcesses, unwanted: list[str], started: float) -> None:
        """Look, and act when the time has come, until nothing is left to do."""
        waves = iter(self._work.waves)
        total = len(self._work.first) + sum(map(len, self._work.waves))
        while time.monotonic() - started < LONGEST_SECONDS:
            killed = self._kill
            doing = f"{killed.worker} killed; one worker goes on" if killed else "two workers at work"
            ended = self._say(doing)
            workers.check()
            wave = next(waves, None) if ended else []
            if wave:
                self._ids.update((one.id, None) for one in self._client.enqueue_batch(wave))
            if unwanted and ended >= total * KILL_AT / 2:
                self._client.cancel_many(unwanted)
                unwanted = []
            if self._kill is None and ended >= total * KILL_AT:
                self._try_to_kill(workers, ended, started)
            if wave is None and not unwanted and ended >= len(self._ids):
                return
            time.sleep(_LOOK_EVERY)

    def _say(self, doing: str) -> int:
        """Show how far it is; the number of jobs that have ended."""
        counts = [queue.counts for queue in self._client.stats()]
        ended = sum(count for one in counts for state, count in one.items() if state.is_terminal)
        accepted = len(self._ids)
        self._show(f"{doing}: {ended:,} of {accepted:,} jobs ended", ended, accepted)
        return ended

    def _try_to_kill(self, workers: WorkerProcesses, ended: int, started: float) -> None:
        """Kill the worker that holds most, if it still does when it is frozen; otherwise at the next look."""
        victim = max(workers.names, key=lambda name: len(self._held_by(name)))
        pid, held = workers.kill_if(victim, lambda: self._held_by(victim))
        if held:
            self._kill = Kill(victim, pid, time.monotonic() - started, ended, held, self._client.now())

    def _held_by(self, worker: str) -> list[str]:
        selection = JobFilter(worker=worker, states=frozenset({JobState.INFLIGHT}))
        return [job.id for job in self._client.list_jobs(selection, limit=1000).jobs]

    # -- afterwards -----------------------------------------------------------------------------------------

    def _judge(self, unwanted: list[str], seconds: float) -> DemoOutcome:
        ids, kill, work = list(self._ids), self._kill, self._work
        attempts = list(self._attempts())
        found = [record for part in chunks(ids, 500) for record in self._client.get_many(part)]
        jobs = {record.id: record for record in found if record is not None}
        verdict = judge(ids, jobs, attempts, unwanted)
        recovered, after = recovery(kill.held, attempts, kill.at_us) if kill else (0, 0)
        requests = len(work.first) + len(work.unwanted) + sum(map(len, work.waves))
        return DemoOutcome(verdict, kill, recovered, after, seconds, requests)

    def _attempts(self) -> Iterator[Attempt]:
        page = self._client.read_attempts()
        while page.attempts:
            yield from page.attempts
            page = self._client.read_attempts(after=page.cursor)


# -- the judgement: functions over jobs and rows, nothing remembered --------------------------------------


def judge(
    accepted: Sequence[str],
    jobs: Mapping[str, JobRecord],
    attempts: Sequence[Attempt],
    cancelled_by_us: Collection[str],
) -> DemoVerdict:
    """Counts what became of the accepted jobs, from their records and the attempt log."""
    states = Counter(jobs[job_id].state for job_id in accepted if job_id in jobs)
    ends = Counter(one.job_id for one in attempts if one.state.is_terminal)
    ended = [job_id for job_id in accepted if job_id in jobs and jobs[job_id].state.is_terminal]
    outcomes = Counter(one.outcome for one in attempts)
    leases = valid_leases(attempts)
    return DemoVerdict(
        accepted=len(accepted),
        done=states[JobState.DONE],
        dead=states[JobState.DEAD],
        cancelled=states[JobState.CANCELLED],
        lost=len(accepted) - len(ended),
        doubled=sum(count > 1 for count in ends.values()),
        unlogged=sum(ends[job_id] == 0 for job_id in ended),
        unexpected=sum(not _as_meant(jobs[job_id], cancelled_by_us) for job_id in ended),
        overlapping_leases=overlapping_leases(attempts),
        executions=len(leases),
        retried=outcomes[Outcome.RETRIED],
        expired=outcomes[Outcome.EXPIRED],
        w_limit=API_LIMIT,
        w_max_overlap=most_at_once((start, end) for one, start, end in leases if one.queue == API_QUEUE),
    )


def _as_meant(job: JobRecord, cancelled_by_us: Collection[str]) -> bool:
    if job.id in cancelled_by_us:
        return job.state is JobState.CANCELLED
    return job.state in MEANT_TO_END.get(job.type, {JobState.DONE})


def valid_leases(attempts: Iterable[Attempt]) -> list[tuple[Attempt, Micros, Micros]]:
    """When the lease of each row was valid: from its grant until it was ended or ran out, whichever was first."""
    return [
        (one, one.reserved_at_us, min(one.ended_at_us, one.lease_expires_at_us or one.ended_at_us))
        for one in attempts
        if one.reserved_at_us is not None
    ]


def overlapping_leases(attempts: Iterable[Attempt]) -> int:
    """Pairs of leases of one job that were valid at the same time."""
    leases: defaultdict[str, list[tuple[Micros, Micros]]] = defaultdict(list)
    for one, start, end in valid_leases(attempts):
        leases[one.job_id].append((start, end))
    pairs = (pair for of_one_job in leases.values() for pair in combinations(sorted(of_one_job), 2))
    return sum(later_start < end for (_, end), (later_start, _) in pairs)


def most_at_once(intervals: Iterable[tuple[Micros, Micros]]) -> int:
    """The largest number of half-open intervals that share an instant."""
    edges = [edge for start, end in intervals if start < end for edge in ((start, 1), (end, -1))]
    # At one instant the ends come before the beginnings.
    return max(accumulate(step for _, step in sorted(edges)), default=0)


def recovery(held: Sequence[str], attempts: Iterable[Attempt], killed_at: Micros) -> tuple[int, Micros]:
    """Return the number of the killed worker's jobs that went on, and the time from the kill to the last of them. Another worker
    took a job up, or it died with its lease because that was its last execution."""
    wanted = set(held)
    taken_up: dict[str, Micros] = {}
    for attempt in attempts:
        start = attempt.reserved_at_us
        if attempt.job_id in wanted and start is not None and start > killed_at:
            taken_up.setdefault(attempt.job_id, start)
        elif attempt.job_id in wanted and attempt.outcome is Outcome.EXPIRED and attempt.state.is_terminal:
            taken_up.setdefault(attempt.job_id, attempt.ended_at_us)
    return len(taken_up), max((at - killed_at for at in taken_up.values()), default=0)
