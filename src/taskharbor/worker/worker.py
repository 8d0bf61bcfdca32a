"""The worker: what a user starts, and what ties its loops together.

Handlers run on the event loop that `run_async` was called on; the backend's loops run on a thread of their own. The
two sides meet in `Hold`s, handed over by the batch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any, Literal, TypedDict

import msgspec

from taskharbor.client import refuse_in_loop
from taskharbor.clock import BackendClock, Clock
from taskharbor.codec import CodecRegistry
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.operations import Reserve
from taskharbor.drivers.registry import connect
from taskharbor.drivers.validation import check, listed
from taskharbor.errors import InvalidRequest, ThreadsLost
from taskharbor.handlers import Handler, Isolation, Lifespan, OnInvalid
from taskharbor.jobs import SECOND, Outcome
from taskharbor.middleware import Call, Job, Middleware, chain, entered, function_call
from taskharbor.requests import as_seconds
from taskharbor.retry import RetryPolicy
from taskharbor.worker.backend_loop import Engine, stay
from taskharbor.worker.fetch import Allowance, Assignment, OnStart, Outage, WorkerConfig
from taskharbor.worker.heartbeat_process import HeartbeatProcess, WatchedWorker
from taskharbor.worker.lifespan_limit import LifespanLimit
from taskharbor.worker.logs import logged
from taskharbor.worker.process_setup import interrupts, tuned_interpreter
from taskharbor.worker.processes import ProcessPool, SuspectPool
from taskharbor.worker.run import MOST_LOST, BatchRunner, BufferedRunner, Runner, ThreadPool

log = logging.getLogger("taskharbor.worker")

SHORTEST_LEASE = 1.0


def share_out(
    config: WorkerConfig, handlers: Sequence[Handler]
) -> Iterator[tuple[WorkerConfig, Handler | None]]:
    """The work of each engine: one takes jobs that run one by one, and each batch handler has its own."""
    # A claim cannot leave types out: where one is for batches, all others are named.
    types = tuple(handler.type for handler in handlers) if config.types is None else config.types
    batched = {handler.type: handler for handler in handlers if handler.batch and handler.type in types}
    if not batched:
        yield config, None
        return
    singles = tuple(type for type in types if type not in batched)
    config = msgspec.structs.replace(config, types=types, claims=singles)
    if singles:
        yield config, None
    for name, handler in batched.items():
        assert handler.batch is not None
        # As many as go into one call, and no more ahead: what arrives meanwhile goes into the next.
        size = handler.batch.size
        own = {"claims": (name,), "concurrency": size, "prefetch": 0, "batch": size, "sizes": {}}
        yield msgspec.structs.replace(config, **own), handler


async def run_together(engines: Sequence[Engine]) -> None:
    """Until all have ended. One that fails ends the others, gracefully."""
    running = [asyncio.ensure_future(engine.run()) for engine in engines]
    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    for engine, task in zip(engines, running, strict=True):
        if not task.done():
            engine.ask_to_stop()
    await asyncio.gather(*running)


class PlainOptions(TypedDict, total=False):
    """Options of `Worker` that can be sent to another process."""

    queues: Sequence[str] | Mapping[str, int]
    order: Literal["turns", "strict"]
    limits: Mapping[str, int] | None
    types: Sequence[str] | None
    every_type: bool
    concurrency: int
    lease: timedelta | float
    heartbeat: timedelta | float | None
    heartbeat_process: bool | str
    poll_interval: timedelta | float
    prefetch: int
    batch: int | None
    grace: timedelta | float
    until_empty: bool | Literal["retries"]
    max_jobs: int | None
    max_seconds: timedelta | float | None


class WorkerOptions(PlainOptions, total=False):
    """Options of `Worker` and of `harbor.worker(...)`."""

    name: str | None
    middleware: Sequence[Middleware]
    codecs: CodecRegistry | None
    clock: Clock | None
    rng: Random | None
    lifespan: Lifespan | None
    on_start: OnStart | None


class Worker:
    """Leases jobs, runs their handlers, writes how they ended.

    `concurrency` bounds what runs at once; `lease` seconds after a worker's death its jobs run elsewhere; `grace` is how long a
    graceful stop waits for handlers. A worker claims the types that it has handlers for; a job of another type waits for a worker
    that knows it. `types` restricts the claims further. With `every_type` the worker claims all jobs of its queues, and one
    without a handler is dead with that reason; a worker with batch handlers claims only the types it knows even so. `lifespan` is
    entered before the first job and left after the last. `on_start` gets the open driver and the time before the first claim.

    Queues are served in turn. A mapping gives them weights: `queues={"urgent": 5, "mail": 1}`. With `order="strict"` a queue is
    served only if those before it are empty. `limits={"mail": 2}` bounds the jobs of a queue that run at once in this worker.
    With `heartbeat_process` a process beside the worker extends leases while a handler holds the interpreter lock; it gets the
    store's URL, which is the option's value if the worker is given a driver.
    `until_empty` stops the worker when nothing is left to do now, and `until_empty="retries"` when also no failed job waits for
    its retry.
    """

    def __init__(
        self,
        driver: Driver | str,
        *,
        queues: Sequence[str] | Mapping[str, int] = ("default",),
        order: Literal["turns", "strict"] = "turns",
        limits: Mapping[str, int] | None = None,
        types: Sequence[str] | None = None,
        every_type: bool = False,
        concurrency: int = 20,
        lease: timedelta | float = 15.0,
        heartbeat: timedelta | float | None = None,
        heartbeat_process: bool | str = False,
        poll_interval: timedelta | float = 1.0,
        prefetch: int = 4000,
        batch: int | None = None,
        grace: timedelta | float = 30.0,
        until_empty: bool | Literal["retries"] = False,
        max_jobs: int | None = None,
        max_seconds: timedelta | float | None = None,
        name: str | None = None,
        middleware: Sequence[Middleware] = (),
        codecs: CodecRegistry | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
        lifespan: Lifespan | None = None,
        on_start: OnStart | None = None,
    ) -> None:
        if every_type and types is not None:
            raise InvalidRequest(f"types={list(types)!r} and every_type: give one of them")
        names = tuple(dict.fromkeys(listed("queues", queues)))
        weights = dict(queues) if isinstance(queues, Mapping) else {}
        if order not in ("turns", "strict"):
            raise InvalidRequest(f"order {order!r}: give 'turns' or 'strict'")
        if weights and order == "strict":
            raise InvalidRequest(f"queues={weights!r} has weights, and order='strict': give one of them")
        if unserved := [queue for queue in limits or () if queue not in names]:
            raise InvalidRequest(f"limits for {', '.join(unserved)}: this worker serves {', '.join(names)}")
        for what, counts in (("weight", weights), ("limit", limits or {})):
            for queue, count in counts.items():
                if type(count) is not int or count < 1:
                    raise InvalidRequest(f"{what} {count!r} of queue {queue!r}: give a whole number from 1")
        if until_empty not in (False, True, "retries"):
            raise InvalidRequest(f"until_empty {until_empty!r}: choose True, False or 'retries'")
        seconds = as_seconds("lease", lease)
        beat = seconds / 3 if heartbeat is None else as_seconds("heartbeat", heartbeat)
        if seconds < SHORTEST_LEASE:
            raise InvalidRequest(f"lease of {seconds:g} s: at least {SHORTEST_LEASE:g} s")
        if not 0 < beat <= seconds / 2:
            raise InvalidRequest(f"heartbeat every {beat:g} s: at most half the lease of {seconds:g} s")
        self.driver = connect(driver) if isinstance(driver, str) else driver
        self.config = WorkerConfig.checked(
            name=name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
            queues=names,
            order=order,
            weights=weights,
            limits=dict(limits or {}),
            types=None if types is None else tuple(listed("types", types)),
            concurrency=concurrency,
            lease_us=round(seconds * SECOND),
            heartbeat=beat,
            poll_interval=as_seconds("poll_interval", poll_interval),
            prefetch=prefetch,
            batch=self.driver.capabilities.batch if batch is None else batch,
            grace=as_seconds("grace", grace),
            until_empty=until_empty,
            max_jobs=max_jobs,
            max_seconds=None if max_seconds is None else as_seconds("max_seconds", max_seconds),
        )
        for queue in self.config.queues:
            # Refused here, and not when the first claim is made.
            check(Reserve(queue, 1, self.config.lease_us, 0, self.config.name, list(types or ())))
        url = driver if heartbeat_process is True else heartbeat_process or None
        watched = WatchedWorker(str(url), self.name, self.config.lease_us, beat)
        self._keeping = watched if isinstance(url, str) else None
        can_keep = self._keeping and self.driver.capabilities.multi_process and sys.platform == "linux"
        if heartbeat_process and (not can_keep or str(url).startswith("http")):
            wanted = "it works on Linux, with the URL of a store that processes share, and without a broker"
            raise InvalidRequest(f"heartbeat_process: {wanted}")
        self._every_type = every_type
        self._lifespan = lifespan
        self._limit: LifespanLimit | None = None
        self._on_start = on_start
        self._middleware = list(middleware)
        self._codecs = codecs or CodecRegistry()
        self._clock = clock
        self._rng = rng
        self._handlers: dict[str, Handler] = {}
        self._engines: list[Engine] = []
        self._stop_asked = 0
        self._lost_threads = 0
        self._is_running = False
        self._processes: ProcessPool | None = None
        self._suspects: SuspectPool | None = None
        self.is_made_by_import = False
        """True if another process that imports the app's modules has all that the handlers need. The command line sets it. Jobs
        whose lease ran out before then run in a process of their own."""
        # Reentrant: a signal may interrupt `stop` in the main thread and call it again.
        self._lock = threading.RLock()
        self.outcomes: Counter[Outcome] = Counter()
        """Number of executions by outcome since this worker started."""

    @property
    def name(self) -> str:
        """The name of the worker in leases and logs."""
        return self.config.name

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers by job type."""
        return dict(self._handlers)

    def register(
        self,
        type: str,
        handler: Callable[[Job], Any],
        *,
        isolation: Isolation | None = None,
        retry: RetryPolicy | None = None,
        on_invalid: OnInvalid = "dead",
        size: int = 1,
    ) -> None:
        """Run `handler(job)` for every job of this type."""
        made = Handler(type, handler, isolation=isolation, retry=retry, on_invalid=on_invalid, size=size)
        self.add_handler(made)

    def add_handler(self, handler: Handler) -> None:
        """Add a handler that is made already. It is refused while the worker runs: its claims name the types."""
        if self._is_running:
            raise InvalidRequest(f"worker {self.name} is running: register {handler.type!r} before it starts")
        if handler.type in self._handlers:
            raise InvalidRequest(f"a handler for {handler.type!r} is registered already")
        concurrency, types = self.config.concurrency, self.config.types
        is_served = types is None or handler.type in types
        if is_served and handler.batch is not None:
            from taskharbor.batch_jobs import require_arrow

            require_arrow()
        if is_served and handler.size > concurrency:
            raise InvalidRequest(
                f"{handler.type!r} has the size {handler.size}, and this worker has {concurrency} places: raise its "
                "concurrency, or leave the type to another worker with types=[...]"
            )
        self._handlers[handler.type] = handler

    def snapshot(self) -> dict[str, Any]:
        """The worker's state right now, for health checks. Any thread may call it."""
        engines = self._engines
        return {
            "worker": self.name,
            "queues": list(self.config.queues),
            "running": bool(engines),
            "serving": bool(engines) and all(engine.is_serving for engine in engines),
            "backend_answers": bool(engines) and not any(one.assignment.outage.is_on for one in engines),
            "held": sum(len(engine.assignment.holds) for engine in engines),
            "outcomes": {str(outcome): count for outcome, count in self.outcomes.items()},
        }

    # -- running ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until stopped. SIGINT or SIGTERM: gracefully; a second one: at once."""
        refuse_in_loop("worker.run()", "await worker.run_async()")
        self._limit = LifespanLimit(self.config.grace, self.config.max_seconds)
        try:
            with self._interrupts(self._limit), tuned_interpreter():
                asyncio.run(self.run_async())
        finally:
            self._limit.close()
            self._limit = None

    async def run_async(self) -> None:
        """Work until stopped, with handlers on the calling event loop and the backend on a thread.

        Raises:
            InvalidRequest: The worker has no handlers.
            ThreadsLost: It stopped because several threads did not come back after their jobs' timeouts. Only a new process is
                rid of them.
        """
        if not self._handlers and not self._every_type:
            raise InvalidRequest(
                "this worker has no handlers, so there is nothing that it could run: register one, or declare jobs on an app"
            )
        async with entered(self._lifespan):
            with nullcontext() if self._limit is None else self._limit.suspended():
                await self._run_async()

    async def _run_async(self) -> None:
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()

        def stopped() -> None:
            if not ended.done():
                ended.set_result(None)

        def backend() -> None:
            try:
                asyncio.run(self._serve(assignments, stopped))
            except BaseException as error:
                if not ended.done():
                    ended.set_exception(error)
            stopped()

        with self._assignments(has_own_thread=True) as assignments:
            threading.Thread(target=backend, name="taskharbor-backend", daemon=True).start()
            waiting = asyncio.wrap_future(ended)
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                # Cancelling the worker is the immediate stop: leases are given back before we go.
                self.stop(now=True)
                await waiting
                raise
            finally:
                for pool in (self._processes, self._suspects):
                    if pool is not None:
                        await pool.close()
        if lost := self._lost_threads:
            self._lost_threads = 0
            raise ThreadsLost(f"{lost} threads did not come back after their timeouts: start a new process")

    def stop(self, *, now: bool = False) -> None:
        """Ask the worker to stop, from any thread: gracefully, or at once."""
        with self._lock:
            self._stop_asked = max(self._stop_asked, 2 if now else 1)
            # Under the lock: the engines are taken away under it too, before their loop closes.
            for engine in self._engines:
                engine.request_stop(now=now)

    def _note_lost(self, count: int) -> None:
        if count > MOST_LOST:
            self._lost_threads = count
            log.error("%d threads are lost: worker %s stops, for a new process", count, self.name)
            self.stop()

    @contextmanager
    def _assignments(self, *, has_own_thread: bool = False) -> Iterator[list[Assignment]]:
        """The parts that one run needs on the handlers' loop."""
        with self._lock:
            if self._is_running:
                said = f"worker {self.name} is running already"
                raise RuntimeError(f"{said}: make another one for another loop")
            self._is_running = True
        handlers = list(self._handlers.values())
        size = self.config.concurrency + sum(handler.batch is not None for handler in handlers)
        threads = ThreadPool(size, grace=self.config.grace, on_lost=self._note_lost)
        process = None if self._keeping is None else HeartbeatProcess(self._keeping)
        try:
            isolated = [handler for handler in handlers if handler.isolation == "process"]
            self._processes = ProcessPool(isolated, codecs=self._codecs) if isolated else None
            types = self.config.types
            if types is None and not self._every_type:
                types = tuple(self._handlers)
            large = [one for one in handlers if one.size > 1 and (types is None or one.type in types)]
            sizes = {handler.type: handler.size for handler in large}
            config = msgspec.structs.replace(self.config, types=types, sizes=sizes)
            shares = list(share_out(config, handlers))
            # Limits of queues hold over all fetch loops too.
            is_bounded = bool(config.max_jobs or config.limits)
            shared = Allowance(config.max_jobs or sys.maxsize, len(shares) > 1) if is_bounded else None
            assignments: list[Assignment] = []
            for config, batched in shares:
                # A handle each: large claims and writes do not wait for small ones, nor those for them.
                driver = self.driver.clone() if assignments else self.driver
                clock = self._clock or BackendClock(driver.time)
                assignment = Assignment(
                    config=config,
                    driver=driver,
                    clock=clock,
                    runner=self._runner(config, batched, clock, threads),
                    outage=Outage(self._rng),
                    outcomes=self.outcomes,
                    allowance=shared or Allowance(),
                    siblings=assignments,
                    has_own_thread=has_own_thread,
                    on_start=self._on_start,
                    on_heartbeat=process.tell if process else lambda: None,
                )
                assignments.append(assignment)
            yield assignments
        finally:
            threads.close()
            if process is not None:
                process.close()
            self._processes = self._suspects = None
            self._is_running = False

    def _runner(
        self, config: WorkerConfig, batched: Handler | None, clock: Clock, threads: ThreadPool
    ) -> BufferedRunner:
        if batched is not None:
            return BatchRunner(batched, threads=threads, codecs=self._codecs, now=clock.now)
        outermost = logged if log.isEnabledFor(logging.DEBUG) else lambda call: call

        def entry(handler: Handler, innermost: Call) -> tuple[Handler, Call]:
            return handler, outermost(chain(handler, self._codecs, self._middleware, innermost))

        handlers = self._handlers.values()
        chains = {one.type: entry(one, self._innermost(one, threads)) for one in handlers}
        in_process = [one for one in handlers if one.isolation != "process"]
        is_portable = self.is_made_by_import and self.driver.capabilities.multi_process
        suspects = self._suspects = SuspectPool(in_process if is_portable else (), codecs=self._codecs)
        suspects.chains = {one.type: entry(one, suspects.run) for one in suspects.handlers}
        return Runner(
            chains,
            concurrency=config.concurrency,
            codecs=self._codecs,
            now=clock.now,
            in_process=[one.type for one in in_process],
            suspects=suspects,
        )

    def _innermost(self, handler: Handler, threads: ThreadPool) -> Call:
        """The call of the handler itself, where it is to run."""
        if handler.isolation == "process":
            assert self._processes is not None
            return self._processes.run
        call = function_call(handler)
        if handler.isolation == "thread":
            return lambda job: threads.run(job, partial(call, job))
        return call

    async def _serve(
        self, assignments: Sequence[Assignment], stopped: Callable[[], object] = lambda: None
    ) -> None:
        """Run the engines to their end. `stopped` is called if they leave something: threads, or calls of a driver that hang."""
        engines = [Engine(assignment) for assignment in assignments]
        with self._lock:
            self._engines = engines
            asked = self._stop_asked
        if asked:
            for engine in engines:
                engine.ask_to_stop(now=asked > 1)
        log.info("worker %s serves %s", self.name, ", ".join(self.config.queues))
        try:
            await run_together(engines)
        finally:
            with self._lock:
                self._engines = []
                self._stop_asked = 0
            total = self.outcomes.total()
            log.info("worker %s stopped after %d execution%s", self.name, total, "" if total == 1 else "s")
        if outlived := [engine for engine in engines if engine.is_outlived]:
            self.driver = self.driver.clone()  # For the next run: this one is still in use.
            await stay(outlived, stopped)

    # -- signals --------------------------------------------------------------------------------------------

    def _interrupts(self, limit: LifespanLimit) -> AbstractContextManager[None]:
        """Not the loop's own handlers: a signal must be heard while a handler blocks the loop."""
        received = 0

        def on_signal(number: int) -> None:
            nonlocal received
            received += 1
            if received == 1:
                what = f"the {limit.place} of the lifespan gets" if limit.place else "running jobs get"
                log.info("stopping: %s %g s (a second signal stops at once)", what, limit.grace)
                self.stop()
                limit.ask_to_stop()
            elif received == 2:
                self.stop(now=True)
                limit.end(limit.place)
            else:
                os._exit(128 + number)

        return interrupts(on_signal)
