"""Runs workers on executors and keeps them running: the driver's side, and at the end the task's.

Each worker is a Spark job of its own, submitted from a thread of its own: a stage that fails takes only one of them down, and
that one is submitted again until the run is over.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from taskharbor.cli.app_loading import load_app
from taskharbor.cli.errors import BadInput
from taskharbor.client import Client
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError
from taskharbor.jobs import JobState
from taskharbor.requests import as_seconds, new_id
from taskharbor.spark.session import require_shared_store
from taskharbor.spark.workers.stop_mark import clear_mark, is_marked, set_mark, watching
from taskharbor.worker.process_setup import interrupts
from taskharbor.worker.worker import PlainOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_OUTAGE = (BackendUnavailable, OSError)
_WORK_STATES = (JobState.READY, JobState.SCHEDULED, JobState.BLOCKED)


def absolute_url(url: str) -> str:
    """Return the URL with an absolute path for an SQLite file: executors run in another folder."""
    scheme, mark, rest = url.partition("://")
    if scheme != "sqlite" or not rest.startswith("/") or rest.startswith("//"):
        return url
    path, question, options = rest[1:].partition("?")
    return f"{scheme}{mark}/{os.path.abspath(path)}{question}{options}"


log = logging.getLogger("taskharbor.spark")

LOOK_EVERY = 1.0
# The most losses of one worker in a row. With more, the executors are not the cause.
MOST_LOSSES = 10
DEFAULT_GRACE = 30.0
# Seconds that a worker needs beyond its grace period: to notice the mark, end handlers that do not stop, write and report.
_AFTER_GRACE = 10.0
_AFTER_CANCEL = 15.0
_SHIP = " (executors import the app themselves: ship it with --py-files or SparkContext.addPyFile)"


class ExecutorWorker(msgspec.Struct, kw_only=True):
    """One of the workers, over all executors on which it ran.

    `host` is the one on which it ended; empty if its last executor was lost. `outcomes` has the number of executions by outcome,
    as far as reported: only the store knows those of a lost executor. `lost` is the number of its Spark jobs that failed, with
    its executor or by cancellation.
    """

    number: int
    name: str = ""
    host: str = ""
    outcomes: dict[str, int] = {}
    seconds: float = 0.0
    submitted: int = 0
    lost: int = 0

    @property
    def done(self) -> int:
        return self.outcomes.get("done", 0)

    @property
    def failed(self) -> int:
        """Executions that failed, whether they are retried or dead."""
        return self.outcomes.get("retried", 0) + self.outcomes.get("dead", 0)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A look at the queues while workers run. `ended`: jobs that ended since the start, on any worker. `workers`: the number of
    workers that are still running."""

    seconds: float
    ended: int
    waiting: int
    inflight: int
    workers: int
    stopping: bool = False


class DrainSummary(msgspec.Struct, kw_only=True):
    """How a run ended.

    `run` is its name: `ask_to_stop(url, run)` ends it from anywhere. `ended`: jobs that ended in the meantime by the store's
    count, which includes those of lost executors. `stopped`: it was asked to stop. `cancelled`: some tasks did not end in time
    and were cancelled: their jobs run again when their leases expire.
    """

    run: str
    workers: list[ExecutorWorker]
    ended: int
    seconds: float
    stopped: bool = False
    cancelled: bool = False

    @property
    def done(self) -> int:
        return sum(worker.done for worker in self.workers)

    @property
    def failed(self) -> int:
        return sum(worker.failed for worker in self.workers)

    @property
    def lost(self) -> int:
        return sum(worker.lost for worker in self.workers)


class WorkersFailed(TaskHarborError):
    """Workers could not work on the executors; the message says why."""


def run_on_executors(
    spark: SparkSession,
    app: str,
    url: str | None = None,
    *,
    workers: int | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[Progress], None] | None = None,
    started: Callable[[str, int], None] | None = None,
    **options: Unpack[PlainOptions],
) -> DrainSummary:
    """Run the workers of an app (`module:harbor`) inside Spark tasks, until their bounds are reached or they are stopped.

    `url` overrides the app's own store. `workers`: one per task slot unless said otherwise. `stop` asks for a graceful stop
    when set; in the main thread SIGINT and SIGTERM do so too, and a second one cancels the tasks. `options` are those
    of `Worker`, for each of them. `started` is told the run's name and the number of workers, `progress` about every second.
    """
    run = _WorkerRun(spark, app, url, workers, options)
    return run.drain(stop or threading.Event(), progress, started)


class _WorkerRun:
    def __init__(
        self, spark: SparkSession, app: str, url: str | None, workers: int | None, options: PlainOptions
    ) -> None:
        """Check app, store and options, so that a mistake is reported before an executor starts."""
        try:
            self._context = spark.sparkContext
        except AttributeError:
            raise InvalidRequest(
                "workers need a classic Spark session: Spark Connect cannot run one Spark job per worker"
            ) from None
        self._app = app
        self._url = None if url is None else absolute_url(url)
        harbor = load_app(app)
        self._store = harbor.driver() if self._url is None else connect(self._url)
        require_shared_store(self._store)
        harbor.worker(**options)
        self._queues = list(options.get("queues") or harbor.queues)
        count = self._context.defaultParallelism if workers is None else workers
        if count < 1:
            raise InvalidRequest(f"workers {count}: at least 1")
        self._options = options
        self._name = new_id()
        self._workers = [ExecutorWorker(number=number) for number in range(count)]
        self._grace = as_seconds("grace", options.get("grace", DEFAULT_GRACE))
        self._began = time.monotonic()
        seconds = options.get("max_seconds")
        self._ends = None if seconds is None else self._began + as_seconds("max_seconds", seconds)
        self._problem = ""
        self._hurry = False
        self._stopping = threading.Event()
        self._cancelled = False

    def drain(
        self,
        stop: threading.Event,
        progress: Callable[[Progress], None] | None,
        started: Callable[[str, int], None] | None,
    ) -> DrainSummary:
        from pyspark import InheritableThread

        self._asked = stop
        client = Client(self._store)
        try:
            before = self._look(client).ended
            if started is not None:
                started(self._name, len(self._workers))
            threads = [
                InheritableThread(target=self._keep_running, args=(worker,), daemon=True)
                for worker in self._workers
            ]

            def tell(alive: int) -> None:
                if progress is not None:
                    try:
                        now = self._look(client, before, alive)
                    except _OUTAGE:
                        return  # The workers ride it out.
                    progress(now)

            with interrupts(self._on_signal):
                for thread in threads:
                    thread.start()
                self._watch(client, threads, tell)
            ended = self._look(client, before).ended
        finally:
            # A cancelled task may still be about to look: its mark stays. In an outage it stays too.
            if self._stopping.is_set() and not self._cancelled:
                with suppress(*_OUTAGE):
                    clear_mark(client, self._name)
            client.close()
        if self._problem:
            raise WorkersFailed(self._problem)
        return DrainSummary(
            run=self._name,
            workers=self._workers,
            ended=ended,
            seconds=time.monotonic() - self._began,
            stopped=self._stopping.is_set(),
            cancelled=self._cancelled,
        )

    # -- one worker, on its thread --------------------------------------------------------------------------------

    def _keep_running(self, worker: ExecutorWorker) -> None:
        try:
            in_a_row = 0
            while not self._stopping.is_set():
                if (answer := self._submit(worker)) is not None:
                    self._workers[worker.number], problem = answer
                    if problem:
                        self._give_up(f"worker {worker.number} on {answer[0].host}: {problem}")
                    return
                in_a_row += 1
                if in_a_row >= MOST_LOSSES:
                    said = f"worker {worker.number} failed {in_a_row} times in a row: see the executors' logs"
                    self._give_up(said)
                self._stopping.wait(min(0.1 * 2**in_a_row, 10.0))
        except BaseException as error:  # Said by the thread that waits for all of them.
            self._give_up(f"worker {worker.number} could not be submitted: {type(error).__name__}: {error}")

    def _submit(self, worker: ExecutorWorker) -> tuple[ExecutorWorker, str] | None:
        """Submit a worker and return the answer of `work`; None if the task was lost."""
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        context = self._context
        # The thread's own, in the JVM too: cancelling this group ends this worker and no other.
        context.setJobGroup(self._group(worker), f"TaskHarbor worker {worker.number}", interruptOnCancel=True)
        worker.submitted += 1
        options: dict[str, Any] = dict(self._options)
        if self._ends is not None:
            options["max_seconds"] = max(0.0, self._ends - time.monotonic())
        task = partial(work, run=self._name, app=self._app, url=self._url, options=options)
        answer: tuple[ExecutorWorker, str]
        try:
            (answer,) = context.parallelize([worker], 1).mapPartitions(task).collect()
        except (Py4JError, PySparkException) as failure:
            worker.lost += 1
            reason = str(failure).strip().splitlines()
            log.warning("worker %d was lost: %s", worker.number, reason[0] if reason else failure)
            log.debug("worker %d", worker.number, exc_info=failure)
            return None
        return answer

    def _group(self, worker: ExecutorWorker) -> str:
        return f"taskharbor-{self._name}-{worker.number}"

    def _give_up(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._asked.set()

    # -- all of them, on the caller's thread ------------------------------------------------------------------------

    def _watch(
        self, client: Client, threads: Sequence[threading.Thread], tell: Callable[[int], None]
    ) -> None:
        look_at = self._began
        give_up_at: float | None = None
        while alive := sum(thread.is_alive() for thread in threads):
            now = time.monotonic()
            if self._ends is not None and now >= self._ends:
                self._asked.set()  # Also for tasks that waited for a slot and began late.
            if now >= look_at and self._is_marked(client):
                self._asked.set()
            if self._asked.is_set() and give_up_at is None:
                self._stopping.set()
                give_up_at = now + (self._grace + _AFTER_GRACE if self._mark(client) else 0.0)
            if give_up_at is not None and (now >= give_up_at or self._hurry):
                if self._cancelled:
                    return  # Cancelled long ago, and Spark does not say so: nothing left to wait for.
                self._cancel()
                give_up_at, self._hurry = now + _AFTER_CANCEL, False
            if now >= look_at:
                look_at = now + LOOK_EVERY
                tell(alive)
            next((thread for thread in threads if thread.is_alive()), threads[0]).join(0.1)
        if self._is_marked(client):
            self._stopping.set()
        tell(0)

    def _is_marked(self, client: Client) -> bool:
        """True if somebody else set the mark. Then lost workers are not submitted again."""
        with suppress(*_OUTAGE):
            return is_marked(client, self._name)
        return False

    def _mark(self, client: Client) -> bool:
        try:
            set_mark(client, self._name)
        except _OUTAGE as error:
            log.warning("the store does not answer (%s): the tasks are cancelled instead of asked", error)
            return False
        return True

    def _cancel(self) -> None:
        self._cancelled = True
        log.warning("cancelling the tasks that have not stopped; their jobs run again after their leases")
        for worker in self._workers:
            self._context.cancelJobGroup(self._group(worker))

    def _look(self, client: Client, ended_before: int = 0, alive: int = 0) -> Progress:
        queues = [stats for queue in self._queues for stats in client.stats(queue)]
        ended = sum(one.done_total + one.dead_total + one.cancelled_total for one in queues)
        return Progress(
            seconds=time.monotonic() - self._began,
            ended=ended - ended_before,
            waiting=sum(one.counts[state] for one in queues for state in _WORK_STATES),
            inflight=sum(one.counts[JobState.INFLIGHT] for one in queues),
            workers=alive,
            stopping=self._stopping.is_set(),
        )

    def _on_signal(self, number: int) -> None:
        """Handle Ctrl-C. PySpark's own handler cancels every job at once; here the first one asks, the second cancels."""
        if self._cancelled:
            os._exit(128 + number)
        if self._asked.is_set():
            self._hurry = True
        else:
            log.info("stopping: running jobs get %g s (a second signal cancels the tasks)", self._grace)
            self._asked.set()


# -- the worker inside a Spark task -----------------------------------------------------------------------------------

# The app's ordinary worker, on the task's main thread, until its bounds or a stop. Nothing here may depend on clean-up: a lost
# executor or a cancelled task dies at any line, and leases expire.


def work(
    workers: Iterable[ExecutorWorker], *, run: str, app: str, url: str | None, options: dict[str, Any]
) -> Iterator[tuple[ExecutorWorker, str]]:
    """Run workers in `mapPartitions`, one per partition. The app itself is imported in the task.

    Yields each worker as it ended, and the reason why it could not work, if it would be the same on any other executor. A task
    whose executor died yields nothing.
    """
    for worker in workers:
        worker.host, started, problem = socket.gethostname(), time.monotonic(), ""
        worker.name = f"spark-{worker.number}-{worker.host}-{os.getpid()}-{secrets.token_hex(3)}"
        try:
            harbor = load_app(app)
            if url is not None:
                harbor.use(url)
            with Client(harbor.driver()) as client:
                if not is_marked(client, run):  # Otherwise it was asked to stop before this one began.
                    running = harbor.worker(**options, name=worker.name)
                    with watching(client, run, running.stop):
                        running.run()
                    worker.outcomes = {str(outcome): count for outcome, count in running.outcomes.items()}
        except Exception as error:
            # Returned as a value: after an exception, Spark would repeat the task on other executors.
            problem = f"{type(error).__name__}: {error}" + (_SHIP if isinstance(error, BadInput) else "")
        worker.seconds = time.monotonic() - started
        yield worker, problem
