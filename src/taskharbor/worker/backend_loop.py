"""The backend's side of a worker: fetch, heartbeat, settle, sweep and schedules, on an event loop no handler ever runs on.

A handler that blocks for three lease times keeps its lease: heartbeats never run on the handlers' event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver, Extension, JobFilter, Release
from taskharbor.errors import BackendUnavailable, Forbidden, JobError, SchemaMismatch, TaskHarborError
from taskharbor.jobs import SECOND, JobState, Lease
from taskharbor.schedules import QUEUE as SCHEDULES
from taskharbor.worker.fetch import Assignment, BackendLoop, FetchLoop, Troubles
from taskharbor.worker.run import CANCELLED, LEASE_LOST, SHUTDOWN, Hold
from taskharbor.worker.settle import SettleLoop

log = logging.getLogger("taskharbor.worker")

_ABORT_SECONDS = 2.0
"""Seconds that cancelled handlers have to finish. Then their jobs are released all the same."""
_EMPTY_EVERY = 0.05
_KEPT = "%d threads did not stop in time; their jobs are given back when they end, or when the process does"
_STOOD = "no heartbeat for %.1f s: a handler held the interpreter lock, or this process was stopped"
RECLAIM_EVERY = 5.0
LOOK_EVERY = 60.0
"""Seconds after which schedules are looked at in any case: the backend's clock may have been set."""
PRUNE_EVERY = 60.0
SWEEP_BATCH = 1000


class Engine(BackendLoop):
    """One run of a worker, seen from the backend. Everything here happens on the loop that `run` was started on."""

    def __init__(self, assignment: Assignment) -> None:
        super().__init__(assignment)
        self._changed = assignment.changed
        self._stop = asyncio.Event()
        self._waits_for_retries = self._config.until_empty == "retries"
        self.is_serving = False
        """True from the backend's first answer until a stop is asked for."""
        self._in_a_hurry = False
        self._start: asyncio.Timeout | None = None
        self.is_outlived = False
        """True if threads still run jobs, or calls of the driver hang, although the engine has ended."""
        self._fetch = FetchLoop(assignment)
        self._heartbeat = HeartbeatLoop(assignment)
        assignment.heartbeat_over.set()
        self._settle = SettleLoop(assignment, self._fetch.made_room)
        self._sweep = SweepLoop(self._driver, clock=self._clock, rng=assignment.outage.random)
        self._runner.finished = self._settle.finished
        self._schedules = ScheduleLoop(
            self._driver, clock=self._clock, name=self._config.name, poll=self._config.poll_interval
        )

    def request_stop(self, *, now: bool = False) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self.ask_to_stop, now)

    def ask_to_stop(self, now: bool = False) -> None:
        """On the engine's own loop."""
        self._in_a_hurry = self._in_a_hurry or now
        self.is_serving = False
        self._stop.set()
        self._changed.set()
        if self._start is not None and self._start.when() is None:
            self._start.reschedule(self._loop.time() + _ABORT_SECONDS)

    # -- life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        if self._config.max_seconds is not None:
            self._loop.call_later(self._config.max_seconds, self.ask_to_stop)
        try:
            if await self._reach():
                self.is_serving = True
                await self._work()
        finally:
            if not self.is_outlived:
                await self._end(asyncio.ensure_future(self._driver.close()))

    async def _reach(self) -> bool:
        """Until the backend answers for the first time; False if we are asked to stop before it does."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS if self._stop.is_set() else None) as self._start:
                await self._outage.ride_out(self._driver.open, give_up=self._stop.is_set)
                await self._outage.ride_out(self._clock.refresh, give_up=self._stop.is_set)
                if self.assignment.on_start is not None:
                    start = partial(self.assignment.on_start, self._driver, self._clock.now())
                    await self._outage.ride_out(start, give_up=self._stop.is_set)
        except (BackendUnavailable, OSError) as error:
            log.warning("stopped before the backend answered: %s", str(error) or "it hangs")
            return False
        finally:
            self._start = None
        return not self._stop.is_set()

    async def _work(self) -> None:
        config = self._config
        fetching = asyncio.ensure_future(self._fetch.run())
        lasting = [asyncio.ensure_future(loop.run()) for loop in (self._heartbeat, self._settle, self._sweep)]
        if config.until_empty:
            lasting.append(asyncio.ensure_future(self._stop_when_empty()))
        # Not one of those that last: it may end, and a worker that is bounded does not wait for it.
        is_first = next(iter(self.assignment.siblings), self.assignment) is self.assignment
        upkeep = [asyncio.ensure_future(self._schedules.run())] if is_first else []
        stopping = asyncio.ensure_future(self._stop.wait())
        fetching.add_done_callback(lambda _: self._changed.set())
        for loop in lasting:
            loop.add_done_callback(self._note_end)
        try:
            await asyncio.wait([fetching, stopping, *lasting], return_when=asyncio.FIRST_COMPLETED)
            if fetching.done() and fetching.exception() is None and not self._in_a_hurry:
                # max_jobs reached: what was taken is finished, however long that takes.
                await self._until_settled(fetching, None, lambda: self._stop.is_set() or self._in_a_hurry)
            await self._shut_down(fetching)
        finally:
            for task in (stopping, fetching, *lasting, *upkeep):
                task.cancel()
            await self._end(fetching, *lasting, *upkeep)
        for task in (fetching, *lasting):
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, (BackendUnavailable, OSError)):
                raise error

    async def _end(self, *tasks: asyncio.Future[None]) -> None:
        """Wait for tasks that have nothing more to do. A driver may take long to see that its backend hangs: not so long."""
        _, pending = await asyncio.wait(tasks, timeout=_ABORT_SECONDS)
        self.is_outlived = self.is_outlived or bool(pending)

    def _note_end(self, loop: asyncio.Future[None]) -> None:
        if not loop.cancelled() and loop.exception() is not None:
            self._in_a_hurry = True  # Without this loop nothing more can be finished properly.
        self._changed.set()

    async def _shut_down(self, fetching: asyncio.Future[None]) -> None:
        """Stop fetching, finish what runs within the grace period, give back the rest, write everything."""
        grace = 0.0 if self._in_a_hurry else self._config.grace
        self.assignment.closing_at = self._loop.time() + grace + 2 * _ABORT_SECONDS
        self._fetch.stop()
        # A reserve that is under way may take long where the backend hangs: what it still brings is given back too.
        self._runner.call(self._runner.release_buffered)
        await self._until_settled(fetching, grace, unless=lambda: self._in_a_hurry)
        if self._holds or not fetching.done():
            self._runner.call(self._runner.abort_running, SHUTDOWN)
            # A handler that blocks its loop runs until that turns again, and so long its lease is kept.
            turned = asyncio.Event()
            self._runner.call(self._loop.call_soon_threadsafe, turned.set)
            await turned.wait()
            await self._until_settled(fetching, _ABORT_SECONDS)
        if not fetching.done():
            fetching.cancel()
            await asyncio.wait([fetching], timeout=_ABORT_SECONDS)
        if self._holds:
            await self._give_back()

    async def _until_settled(
        self,
        fetching: asyncio.Future[None],
        seconds: float | None,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Until nothing is held or on its way here, the time is up, or there is a reason not to wait."""
        try:
            async with asyncio.timeout(seconds):
                while (self._holds or not fetching.done()) and not unless():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    async def _give_back(self) -> None:
        """Release the jobs of handlers that did not stop, except those on threads: these run on for as long as the process."""
        unwritten = sum(hold.settling for hold in self._holds)
        if unwritten:
            log.warning("%d jobs ended but could not be written; they run again", unwritten)
        stuck = [hold for hold in self._holds if not hold.settling and not hold.lost]
        self._holds.clear()
        self._holds.update({hold: None for hold in stuck if hold.is_on_thread})
        if self._holds:
            log.warning(_KEPT, len(self._holds))
            self.is_outlived = True
        stuck = [hold for hold in stuck if hold not in self._holds]
        for hold in stuck:
            hold.lost = True
        if not stuck:
            return
        log.warning("%d handlers did not stop in time; their jobs are given back", len(stuck))
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.assignment.heartbeat_over.wait()
                await self._each(self._release, stuck)
        except (TaskHarborError, OSError) as error:
            log.warning("jobs could not be given back (%s); they run again when their leases expire", error)

    def _release(self, holds: Sequence[Hold]) -> Awaitable[list[JobError | None]]:
        releases = [Release(hold.record.id, hold.token) for hold in holds]
        return self._driver.settle(releases, now=self._clock.now())

    # -- threads that outlive the engine ----------------------------------------------------------------------

    async def stay(self, is_over: asyncio.Event) -> None:
        """Keep the leases of threads that still run. A job is given back when its thread ends, or when the process does."""
        interval, grace = self._config.heartbeat, round(self._config.grace * SECOND)
        while self._holds:
            is_last, now = is_over.is_set(), self._clock.now()
            for hold in self._holds:
                # Past timeout and grace a lease is no longer kept, here as in a worker that runs.
                hold.lost = hold.lost or hold.record.is_overdue(now - grace)
            ended = [hold for hold in self._holds if is_last or hold.lost or not hold.is_on_thread]
            # RuntimeError: the handlers' loop is closed, so there is nobody to hear of a lease that is lost.
            with suppress(BackendUnavailable, OSError, RuntimeError):
                async with asyncio.timeout(interval):
                    releases = [Release(hold.record.id, hold.token) for hold in ended if not hold.lost]
                    await self._driver.settle(releases, now=now)
                    for hold in ended:
                        del self._holds[hold]
                    await self._heartbeat.beat()
            if is_last:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), interval)
        await self._driver.close()

    # -- empty or not -----------------------------------------------------------------------------------------

    async def _stop_when_empty(self) -> None:
        while True:
            await self._fetch.is_idle.wait()
            in_hand = any(one.holds for one in self.assignment.siblings)
            try:
                if not in_hand and await self._outage.ride_out(self._is_empty):
                    self.ask_to_stop()
                    return
            except SchemaMismatch:
                raise
            except Exception as error:
                self._troubles.say("no telling if work is left", error)
            # To find a retry, it lists what is scheduled.
            await asyncio.sleep(self._config.poll_interval if self._waits_for_retries else _EMPTY_EVERY)

    async def _is_empty(self) -> bool:
        """Nothing to do now or under way anywhere. What is scheduled for later does not count, or only if it is a retry."""
        types = None if self._config.types is None else frozenset(self._config.types)
        for queue in self._config.queues:
            (stats,) = await self._driver.stats(now=self._clock.now(), queue=queue)
            open_states = {JobState.INFLIGHT}
            if not stats.settings.paused:
                open_states |= {JobState.READY, JobState.BLOCKED}
                if self._waits_for_retries:
                    open_states.add(JobState.SCHEDULED)
            # Of the types that this worker serves.
            ours = JobFilter(queue=queue, states=frozenset(open_states), types=types)
            if any(stats.counts[state] for state in open_states) and await self._has_work(ours):
                return False
        return True

    async def _has_work(self, ours: JobFilter) -> bool:
        if ours.types is None and not self._waits_for_retries:
            return True
        limit, cursor = (SWEEP_BATCH if self._waits_for_retries else 1), None
        while True:
            page = await self._driver.list_jobs(ours, now=self._clock.now(), limit=limit, cursor=cursor)
            # A retry may come due, and be claimed, after the figures were read.
            if any(job.state is not JobState.SCHEDULED or job.attempts or job.stalls for job in page.jobs):
                return True
            if (cursor := page.cursor) is None:
                return False


async def stay(engines: Sequence[Engine], stopped: Callable[[], object]) -> None:
    """Until the threads that these engines left behind have ended, or the process does. `stopped` lets the worker return."""
    loop, thread, is_over = asyncio.get_running_loop(), threading.current_thread(), asyncio.Event()

    def give_back() -> None:
        with suppress(RuntimeError):  # The last of them has just ended.
            loop.call_soon_threadsafe(is_over.set)
        thread.join(_ABORT_SECONDS)

    atexit.register(give_back)  # Before the worker returns: that may be the end of the process.
    stopped()
    try:
        await asyncio.gather(*[engine.stay(is_over) for engine in engines])
    finally:
        atexit.unregister(give_back)


class HeartbeatLoop(BackendLoop):
    """Extends leases, and hears of those that are lost or asked to stop."""

    async def run(self) -> None:
        pause = interval = self._config.heartbeat
        while True:
            began, longest = self._loop.time(), pause + 2 * interval
            await asyncio.sleep(pause)
            self.assignment.on_heartbeat()
            try:
                # A half-open connection would hang here while leases run out: better to ask again.
                async with asyncio.timeout(interval):
                    await self.beat()
                pause = interval
            except (BackendUnavailable, OSError) as error:
                log.debug("heartbeat failed: %s", error)
                # Sooner than usual: leases are running out meanwhile.
                pause = min(interval, 0.2)
            if (stood := self._loop.time() - began) > longest:
                # The backend alone knows if the leases were lost meanwhile: it is asked again first.
                log.warning(_STOOD, stood)
            else:
                self._drop_expired()

    async def beat(self) -> None:
        """Extend every lease held. What the backend refuses is lost; what was asked to stop is told so."""
        held = [hold for hold in self._holds if not hold.lost and not hold.settling]
        if not held:
            return
        reports = {hold: hold.progress for hold in held}

        def extend(holds: Sequence[Hold]) -> Awaitable[Sequence[Lease | JobError]]:
            extensions = [
                Extension(
                    hold.record.id, hold.token, None if reports[hold] is hold.reported else reports[hold]
                )
                for hold in holds
            ]
            return self._driver.extend_lease(
                extensions, lease_for=self._config.lease_us, now=self._clock.now()
            )

        self.assignment.heartbeat_over.clear()
        try:
            answers = await self._each(extend, held)
            for (hold, report), answer in zip(reports.items(), answers, strict=True):
                if isinstance(answer, JobError):
                    # While the heartbeat was on its way the job may have been settled: then there was nothing left to lose.
                    if not hold.lost and not hold.settling and hold in self._holds:
                        self._lose(hold, f"lost: {answer.detail or answer.reason}")
                    continue
                hold.token = answer.token
                hold.expires_at_us = answer.expires_at_us
                hold.reported = report
                if answer.cancel_requested and hold.settlement is None:
                    self._runner.call(self._runner.abort, hold, CANCELLED)
        finally:
            self.assignment.heartbeat_over.set()

    def _lose(self, hold: Hold, how: str) -> None:
        log.warning("lease of %s %s %s", hold.record.type, hold.record.id, how)
        hold.lost = True
        self._runner.call(self._runner.abort, hold, LEASE_LOST)

    def _drop_expired(self) -> None:
        """During an outage nobody refuses us, but a lease that ran out is over all the same."""
        now = self._clock.now()
        for hold in list(self._holds):
            if not hold.lost and not hold.settling and hold.expires_at_us <= now:
                self._lose(hold, "ran out before it could be extended")


class SweepLoop:
    """Ends leases whose holders are gone, applies retention, keeps the clock set.

    Reserving reclaims too, but only in the queues somebody still serves; this covers the rest.
    """

    def __init__(self, driver: Driver, *, clock: Clock, rng: random.Random | None = None) -> None:
        self._driver = driver
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._troubles = Troubles()
        self._random = rng or random.Random()
        self._prune_at = self._loop.time() + self._random.uniform(0, PRUNE_EVERY)

    async def run(self) -> None:
        while True:
            # Spread out, so that a fleet started together does not sweep together.
            await asyncio.sleep(RECLAIM_EVERY * self._random.uniform(0.8, 1.2))
            try:
                await self.sweep()
            except (BackendUnavailable, OSError) as error:
                log.debug("sweep failed: %s", error)
            except Exception as error:
                self._troubles.say("expired leases cannot be swept", error)

    async def sweep(self) -> None:
        await self._clock.refresh()
        try:
            while await self._driver.reclaim(now=self._clock.now(), limit=SWEEP_BATCH) == SWEEP_BATCH:
                pass
        finally:
            # One queue that cannot be swept does not end the retention of all.
            if self._loop.time() >= self._prune_at:
                self._prune_at = self._loop.time() + PRUNE_EVERY
                while await self._driver.prune(now=self._clock.now(), limit=SWEEP_BATCH) >= SWEEP_BATCH:
                    pass


class ScheduleLoop:
    """Makes the jobs of due schedules. It waits for them as the fetch loop waits for jobs, so an idle store is not asked."""

    def __init__(
        self,
        driver: Driver,
        *,
        clock: Clock,
        name: str,
        poll: float = LOOK_EVERY,
        is_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._name = name
        self._is_on = is_on
        # A clock that is moved by hand passes no time while this waits.
        self._timeout = LOOK_EVERY if clock.runs_by_itself else poll
        self._troubles = Troubles()
        self._seen: str | None = None
        self._has_schedules = False

    async def run(self) -> None:
        """Run until cancelled, or until it is clear that somebody else does this."""
        while not self._driver.capabilities.ticks_schedules:
            try:
                if self._is_on():
                    await self._look()
                    continue
            except Forbidden as error:
                log.debug("schedules are left to others: %s", error)
                return
            except (BackendUnavailable, OSError) as error:
                log.debug("schedules cannot be looked at: %s", error)
            except Exception as error:
                self._troubles.say("schedules cannot be looked at", error)
            await asyncio.sleep(1.0)

    async def _look(self) -> None:
        from taskharbor.schedules.ticking import tick

        timeout = self._timeout
        if self._driver.capabilities.waits_by_requests and not self._has_schedules and self._seen is not None:
            # One request now and then, until there is a schedule.
            await asyncio.sleep(RECLAIM_EVERY)
            timeout = 0.0
        waited = await self._driver.wait([SCHEDULES], now=self._clock.now(), timeout=timeout, seen=self._seen)
        await self._clock.refresh()
        while waited.woken:
            # A stop does not come between the jobs of a tick and the next tick's time: they would wait for the lease.
            step = asyncio.ensure_future(tick(self._driver, self._clock.now(), self._name, self._clock))
            try:
                if not await asyncio.shield(step):
                    break
            except asyncio.CancelledError:
                with suppress(Exception):
                    await step
                raise
            self._has_schedules = True
        self._seen = waited.seen
