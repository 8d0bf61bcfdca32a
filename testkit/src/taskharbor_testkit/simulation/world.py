"""A run from beginning to end: inject faults, heal everything, drain, stop, and judge by the guarantees."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import msgspec

from taskharbor.clock import BackendClock, Clock
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.operations import Configure
from taskharbor.jobs import SECOND
from taskharbor.retry import ExponentialBackoff
from taskharbor_testkit.simulation.actors import Handlers, SimulatedWorker, make_client, operate, submit
from taskharbor_testkit.simulation.backend import Backend, Weather, model_driver
from taskharbor_testkit.simulation.guarantees import GUARANTEES, Evidence
from taskharbor_testkit.simulation.scenario import HEALER, Fault, Scenario, WorkerPlan, write_scenario
from taskharbor_testkit.simulation.scheduler import Process, Scheduler, Stuck

DRAIN_SECONDS = 300.0
STOP_SECONDS = 60.0
REPEAT_SECONDS = 3.0
"""A worker repeats a call that got no answer within this time."""


class World:
    def __init__(self, scenario: Scenario, make_driver: Callable[[Clock], Driver] = model_driver) -> None:
        # An independent stream of chance per purpose, so that a change in one place leaves the others alone.
        turns, calls, workers = (
            random.Random(f"{purpose} {scenario.seed}") for purpose in ("scheduler", "network", "workers")
        )
        self.scenario = scenario
        self.scheduler = Scheduler(turns)
        self.backend = Backend(self.scheduler, make_driver, scenario.weather, calls)
        self.ledger = self.backend.ledger
        self._chance = workers
        self._retry = ExponentialBackoff(random=workers)
        self._numbers = count(1)
        self._slots: list[SimulatedWorker | None] = [None] * len(scenario.workers)
        self.workers: list[SimulatedWorker] = []
        self._is_over = False
        """No worker starts any more."""

    def run(self) -> Evidence:
        try:
            drained = self._play()
        except Stuck as stuck:
            self.ledger.mishaps.append(str(stuck))
            drained = self.backend.is_drained()
        evidence = Evidence(
            ledger=self.ledger,
            jobs=self.backend.jobs(),
            workers={worker.process.name: worker.process for worker in self.workers},
            is_drained=drained,
            with_failure_queue=self.scenario.settings,
            patience_us=round((self.scenario.lease / 3 + 1.0) * SECOND),
        )
        self._bury()
        return evidence

    def _play(self) -> bool:
        scenario, scheduler = self.scenario, self.scheduler
        self._configure()
        producers = list(self._start_producers())
        for slot in range(len(self._slots)):
            self._start_worker(slot)
        for fault in scenario.faults:
            scheduler.after(fault.at, self._inject, fault)
        scheduler.run(lambda: False, seconds=scenario.duration)
        self.backend.weather = Weather(slowest=scenario.weather.slowest)
        # An operator's last order may still be on its way; a queue it paused is resumed after that.
        scheduler.run(lambda: all(task.done() for task in producers), seconds=DRAIN_SECONDS)
        scheduler.tell("world", "heals")
        self._configure()
        self._new_worker(HEALER)
        drained = scheduler.run(self._is_drained, seconds=DRAIN_SECONDS)
        self._stop_all()
        self._collect_mishaps(producers)
        return drained

    def _configure(self) -> None:
        for queue, settings in self.scenario.settings.items():
            self.backend.perform("operator", Configure(queue, settings, self.backend.now()))

    def _is_drained(self) -> bool:
        return not any(self.ledger.open.values()) and self.backend.is_drained()

    def _start_producers(self) -> Iterator[Any]:
        """The tasks of the clients and the operator."""
        scenario = self.scenario
        for number, machine in enumerate(scenario.clients):
            process = Process(self.scheduler, f"client{number}", machine)
            mine = sorted((s for s in scenario.submissions if s.client == number), key=lambda s: s.at)
            client = make_client(self.backend, process, self._numbers)
            yield process.loops[0].create_task(submit(client, mine), name=process.name)
        process = Process(self.scheduler, "operator", scenario.clients[0])
        client = make_client(self.backend, process, self._numbers)
        orders = sorted(scenario.orders, key=lambda order: order.at)
        yield process.loops[0].create_task(operate(client, orders, self.ledger), name=process.name)

    def _start_worker(self, slot: int) -> None:
        if self._slots[slot] is None and not self._is_over:
            self._slots[slot] = self._new_worker(self.scenario.workers[slot])

    def _new_worker(self, plan: WorkerPlan) -> SimulatedWorker:
        process = Process(self.scheduler, f"w{len(self.workers) + 1}", plan.machine, threads=2)
        driver = self.backend.driver(process)
        worker = SimulatedWorker(
            driver,
            lease=self.scenario.lease,
            name=process.name,
            clock=BackendClock(driver.time, process.loops[1].monotonic_us),
            rng=self._chance,
            every_type=True,
            **plan.options,
        )
        Handlers(process, self.ledger, self.scheduler).register(worker, self._retry)
        worker.start(process)
        self.workers.append(worker)
        self.scheduler.tell(process.name, "starts")
        return worker

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "outage":
            self._set_outage(True)
            self.scheduler.after(fault.seconds, self._set_outage, False)
            return
        worker = self._slots[fault.worker]
        if worker is None or worker.has_ended:
            return
        process = worker.process
        self.scheduler.tell(process.name, f"{fault.kind} for {fault.seconds:.3f} s")
        if fault.kind in ("freeze", "stall"):
            # A stall stops the backend's side only.
            process.freeze(fault.seconds, process.loops if fault.kind == "freeze" else process.loops[1:])
            return
        if fault.kind == "kill":
            process.kill()
        else:
            process.is_leaving = True
            worker.stop()
        self._slots[fault.worker] = None
        self.scheduler.after(fault.seconds, self._start_worker, fault.worker)

    def _set_outage(self, is_out: bool) -> None:
        self.scheduler.tell("network", "outage" if is_out else "answers again")
        self.backend.weather.is_out = is_out

    def _stop_all(self) -> None:
        self.scheduler.tell("world", "stops")
        self._is_over = True
        self._find_unrepeated()
        for worker in self.workers:
            if not worker.has_ended:
                worker.stop()
        if not self.scheduler.run(lambda: all(w.has_ended for w in self.workers), seconds=STOP_SECONDS):
            slow = [worker.process.name for worker in self.workers if not worker.has_ended]
            self.ledger.mishaps.append(f"did not stop within {STOP_SECONDS:g} s: {', '.join(slow)}")

    def _find_unrepeated(self) -> None:
        for (process, job_id), when in self.backend.unanswered.items():
            waited = self.scheduler.now - max(when, process.frozen_until)
            if waited > REPEAT_SECONDS and not process.is_dead and not process.is_leaving:
                self.ledger.unrepeated.append(
                    f"{process.name} got no answer for job {job_id} at {when:.6f} and did not ask again"
                )

    def _collect_mishaps(self, producers: list[Any]) -> None:
        mishaps = self.ledger.mishaps
        alive = [worker.task for worker in self.workers if not worker.process.is_dead]
        for task in [*alive, *producers]:
            if task.done() and not task.cancelled() and task.exception() is not None:
                mishaps.append(f"{task.get_name()} ended with {task.exception()!r}")
        mishaps.extend(f"{task.get_name()} never ended" for task in producers if not task.done())
        for loop in self.scheduler.loops:
            mishaps.extend(f"{loop.name}: {error}" for error in loop.errors)

    def _bury(self) -> None:
        """End abandoned tasks, so that no clean-up is left to the garbage collector."""
        self.ledger.is_closed = True
        loops = self.scheduler.loops
        for _ in range(10):
            for loop in loops:
                loop.bury()
            try:
                if self.scheduler.run(lambda: not any(loop.tasks for loop in loops), seconds=60.0):
                    return
            except Stuck:
                continue


class Report(msgspec.Struct, kw_only=True):
    """The outcome of one seed. The same seed gives the same report, byte for byte, on any machine."""

    seed: int
    violations: dict[str, list[str]]
    """Guarantee -> a message per violation."""
    trace: list[str] = []
    counts: dict[str, int] = {}
    bug: str | None = None
    """The bug that was planted, by its name on the command line."""

    @property
    def is_ok(self) -> bool:
        return not self.violations

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()

    def __str__(self) -> str:
        if self.is_ok:
            return f"seed {self.seed}: every guarantee held"
        lines = [f"  {name}: {message}" for name, messages in self.violations.items() for message in messages]
        bug = "" if self.bug is None else f" --bug '{self.bug}'"
        command = f"python -m taskharbor_testkit.simulation --seed {self.seed}{bug} --trace"
        return "\n".join([f"seed {self.seed}: {len(lines)} violations; replay with: {command}", *lines])


def simulate(seed: int, make_driver: Callable[[Clock], Driver] = model_driver) -> Report:
    world = World(write_scenario(seed), make_driver)
    ledger = world.ledger
    with _captured_errors(ledger.mishaps):
        evidence = world.run()
    found = {name: list(guarantee(evidence)) for name, guarantee in GUARANTEES.items()}
    return Report(
        seed=seed,
        violations={name: messages for name, messages in found.items() if messages},
        trace=world.scheduler.trace,
        counts={
            "jobs": len(evidence.jobs),
            "calls": ledger.calls,
            "leases": len(ledger.leases),
            "expired leases": sum(lease.has_expired for lease in ledger.leases),
            "executions": len(ledger.executions),
            "virtual seconds": round(world.scheduler.now),
        },
    )


@contextmanager
def _captured_errors(messages: list[str]) -> Iterator[None]:
    """A worker's errors are mishaps. Its warnings and the deaths of jobs are expected here, and nothing formats them."""
    logger = logging.getLogger("taskharbor.worker")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            mock.patch.object(
                logger, "handle", lambda record: messages.append(f"logged: {record.getMessage()}")
            ),
            mock.patch("taskharbor.worker.settle._log_failure"),
        ):
            yield
    finally:
        logger.setLevel(level)
