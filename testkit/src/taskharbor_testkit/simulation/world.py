"""A run from beginning to end: let things go wrong, heal everything, drain, stop, bury."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from taskharbor.clock import BackendClock, Clock
from taskharbor.drivers.contract import Driver, QueueSettings
from taskharbor.drivers.operations import Configure
from taskharbor.jobs import SECOND
from taskharbor.retry import ExponentialBackoff
from taskharbor_testkit.simulation.actors import (
    SimulatedWorker,
    WorkerProcess,
    make_client,
    operate,
    seeded,
    submit,
)
from taskharbor_testkit.simulation.backend import Backend, model_driver
from taskharbor_testkit.simulation.guarantees import Evidence
from taskharbor_testkit.simulation.handlers import Handlers
from taskharbor_testkit.simulation.ledger import Ledger, Trace
from taskharbor_testkit.simulation.network import Network, SimulatedDriver, Weather
from taskharbor_testkit.simulation.process import Process
from taskharbor_testkit.simulation.scenario import (
    FAILED,
    LIMITED,
    MAIN,
    QUEUES,
    Fault,
    Machine,
    Scenario,
    WorkerPlan,
)
from taskharbor_testkit.simulation.scheduler import Scheduler, Stuck

DRAIN_SECONDS = 300.0
STOP_SECONDS = 60.0
REPEAT_SECONDS = 3.0
"""By then at the latest a worker tries again what got no answer."""

_HEALER = WorkerPlan(
    machine=Machine(1800.0, 1.0005),
    queues=QUEUES,
    concurrency=4,
    prefetch=0,
    poll_interval=1.0,
    grace=5.0,
)


class World:
    def __init__(self, scenario: Scenario, make_driver: Callable[[Clock], Driver] = model_driver) -> None:
        seed = scenario.seed
        self.scenario = scenario
        self.trace = Trace()
        self.scheduler = Scheduler(seeded(seed, "scheduler"))
        self.ledger = Ledger()
        self.backend = Backend(self.scheduler, self.ledger, self.trace, make_driver)
        self.network = Network(
            self.scheduler, self.backend, seeded(seed, "network"), scenario.weather, self.trace
        )
        self._chance = seeded(seed, "workers")
        self._retry = ExponentialBackoff(random=self._chance)
        self._numbers = count(1)
        self._incarnations = count(1)
        self._slots: list[WorkerProcess | None] = [None] * len(scenario.workers)
        self.workers: list[WorkerProcess] = []
        self._is_over = False
        """No worker starts any more."""
        self.mishaps: list[str] = []
        self._unrepeated: list[str] = []
        self._settings = {
            MAIN: QueueSettings(failure_queue=FAILED),
            LIMITED: QueueSettings(max_inflight=scenario.limit, failure_queue=FAILED),
        }

    def run(self) -> Evidence:
        try:
            drained = self._play()
        except Stuck as stuck:
            self.mishaps.append(str(stuck))
            drained = self.backend.is_drained()
        evidence = Evidence(
            ledger=self.ledger,
            jobs=self.backend.jobs(),
            workers={worker.process.name: worker.process for worker in self.workers},
            is_drained=drained,
            failure_queues=dict.fromkeys(self._settings, FAILED),
            clock_errors=self.network.clock_errors,
            mishaps=self.mishaps,
            unrepeated=self._unrepeated,
            patience_us=round((self.scenario.lease / 3 + 1.0) * SECOND),
        )
        self._bury()
        return evidence

    def _play(self) -> bool:
        scenario, scheduler = self.scenario, self.scheduler
        self._configure()
        producers = [*self._start_clients(), self._start_operator()]
        for slot in range(len(self._slots)):
            self._start_worker(slot)
        for fault in scenario.faults:
            scheduler.after(fault.at, self._inject, fault)
        scheduler.run(lambda: False, seconds=scenario.duration)
        self.network.weather = Weather(slowest=scenario.weather.slowest)
        # An operator's last order may still be on its way; what it paused is resumed after that.
        scheduler.run(lambda: all(task.done() for task in producers), seconds=DRAIN_SECONDS)
        self._heal()
        drained = scheduler.run(self._is_drained, seconds=DRAIN_SECONDS)
        self._stop_all()
        self._collect_mishaps(producers)
        return drained

    def _tell(self, who: str, what: str) -> None:
        self.trace.add(self.scheduler.now, who, what)

    def _configure(self) -> None:
        for queue, settings in self._settings.items():
            self.backend.perform("operator", Configure(queue, settings, self.backend.now()))

    # -- who is there -------------------------------------------------------------------------------------

    def _driver(self, process: Process) -> SimulatedDriver:
        return SimulatedDriver(self.network, process, self.backend.handle())

    def _process(self, name: str, machine: Machine, threads: int = 1) -> Process:
        return Process(self.scheduler, name, threads=threads, offset=machine.offset, rate=machine.rate)

    def _start_clients(self) -> list[Any]:
        tasks = []
        for number, machine in enumerate(self.scenario.clients):
            process = self._process(f"client{number}", machine)
            mine = sorted((s for s in self.scenario.submissions if s.client == number), key=lambda s: s.at)
            client = make_client(self._driver(process), process.loops[0], self._numbers)
            tasks.append(process.loops[0].create_task(submit(client, mine)))
        return tasks

    def _start_operator(self) -> Any:
        process = self._process("operator", self.scenario.clients[0])
        client = make_client(self._driver(process), process.loops[0], self._numbers)
        orders = sorted(self.scenario.orders, key=lambda order: order.at)
        return process.loops[0].create_task(operate(client, orders, self.ledger))

    def _start_worker(self, slot: int) -> None:
        if self._slots[slot] is None and not self._is_over:
            self._slots[slot] = self._new_worker(self.scenario.workers[slot])

    def _new_worker(self, plan: WorkerPlan) -> WorkerProcess:
        process = self._process(f"w{next(self._incarnations)}", plan.machine, threads=2)
        driver = self._driver(process)
        handlers_loop, backend_loop = process.loops
        worker = SimulatedWorker(
            driver,
            queues=plan.queues,
            concurrency=plan.concurrency,
            lease=self.scenario.lease,
            poll_interval=plan.poll_interval,
            prefetch=plan.prefetch,
            grace=plan.grace,
            name=process.name,
            clock=BackendClock(driver.time, backend_loop.monotonic_us),
            rng=self._chance,
        )
        handlers = Handlers(
            process,
            handlers_loop,
            self.ledger,
            self.backend.now,
            lambda what: self._tell(process.name, what),
        )
        handlers.register(worker, self._retry)
        started = WorkerProcess(process, worker)
        started.start()
        self.workers.append(started)
        self._tell(process.name, "starts")
        return started

    # -- what goes wrong ----------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "outage":
            self._set_outage(True)
            self.scheduler.after(fault.seconds, self._set_outage, False)
            return
        worker = self._slots[fault.worker]
        if worker is None or worker.has_ended:
            return
        self._tell(worker.process.name, f"{fault.kind} for {fault.seconds:.3f} s")
        if fault.kind == "freeze":
            worker.process.freeze(fault.seconds)
        elif fault.kind == "stall":
            worker.process.freeze(fault.seconds, loops=[worker.backend_loop])
        else:
            if fault.kind == "kill":
                worker.process.kill()
            else:
                worker.process.is_leaving = True
                worker.worker.stop()
            self._slots[fault.worker] = None
            self.scheduler.after(fault.seconds, self._start_worker, fault.worker)

    def _set_outage(self, is_out: bool) -> None:
        self._tell("network", "outage" if is_out else "answers again")
        self.network.weather.is_out = is_out

    # -- how it ends --------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self._tell("world", "heals")
        self._configure()
        self._new_worker(_HEALER)

    def _is_drained(self) -> bool:
        return self.ledger.is_quiet() and self.backend.is_drained()

    def _stop_all(self) -> None:
        self._tell("world", "stops")
        self._is_over = True
        self._unrepeated = list(self._find_unrepeated())
        for worker in self.workers:
            if not worker.has_ended:
                worker.worker.stop()
        if not self.scheduler.run(lambda: all(w.has_ended for w in self.workers), seconds=STOP_SECONDS):
            slow = [worker.process.name for worker in self.workers if not worker.has_ended]
            self.mishaps.append(f"did not stop within {STOP_SECONDS:g} s: {', '.join(slow)}")

    def _find_unrepeated(self) -> Iterator[str]:
        for (process, job_id), when in self.network.unanswered.items():
            awake_since = max(when, process.frozen_until)
            waited = self.scheduler.now - awake_since
            if waited > REPEAT_SECONDS and not process.is_dead and not process.is_leaving:
                yield f"{process.name} got no answer for job {job_id} at {when:.6f} and did not ask again"

    def _collect_mishaps(self, producers: list[Any]) -> None:
        for worker in self.workers:
            if worker.error is not None:
                self.mishaps.append(f"{worker.process.name} ended with {worker.error!r}")
        for task in producers:
            if not task.done():
                self.mishaps.append(f"{task!r} never ended")
            elif task.exception() is not None:
                self.mishaps.append(f"a client ended with {task.exception()!r}")
        for loop in self.scheduler.loops:
            self.mishaps.extend(f"{loop.name}: {error}" for error in loop.errors)

    def _bury(self) -> None:
        """End what was abandoned, so that no clean-up is left to the garbage collector."""
        self.network.is_closed = self.ledger.is_closed = True
        loops = self.scheduler.loops
        for _ in range(10):
            for loop in loops:
                loop.bury()
            try:
                if self.scheduler.run(lambda: not any(loop.tasks for loop in loops), seconds=60.0):
                    return
            except Stuck:
                continue
