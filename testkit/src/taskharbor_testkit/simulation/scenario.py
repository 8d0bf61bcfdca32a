"""From a seed to a scenario: the processes, their requests, and the faults with their times. Pure data."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import msgspec

from taskharbor.drivers.contract import QueueSettings
from taskharbor.jobs import JobRequest, UpdateFlags
from taskharbor_testkit.simulation.backend import Weather
from taskharbor_testkit.simulation.scheduler import Machine

MAIN, LIMITED, FAILED = "main", "limited", "failed"
QUEUES = (MAIN, LIMITED, FAILED)

WORK, TYPED, ORPHAN = "work", "typed", "orphan"
"""Ordinary jobs, jobs whose payload is validated, jobs nobody has a handler for."""

FAULTS = ("kill", "kill", "stop", "freeze", "freeze", "stall", "outage")
VERBS = ("cancel", "cancel", "requeue", "pause", "resume", "limit")
PASSING_ACTS = ("raise", "retry", "snooze", "quit", "stubborn")
LAST_ACTS = ("return", "return", "return", "raise", "give_up", "discard", "block")


class WorkerPlan(msgspec.Struct, frozen=True):
    machine: Machine
    options: dict[str, Any]
    """Options of `Worker`."""


HEALER = WorkerPlan(
    Machine(1800.0, 1.0005),
    {"queues": QUEUES, "concurrency": 4, "prefetch": 0, "poll_interval": 1.0, "grace": 5.0},
)
"""Serves every queue once everything is healed."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A client sends a batch, once or several times over."""

    at: float
    client: int
    requests: tuple[JobRequest, ...]
    times: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An operator steps in. `which` picks a job or a limit, as a share of what there is."""

    at: float
    verb: str
    queue: str
    which: float


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    kind: str
    worker: int
    seconds: float
    """The duration in seconds; for a kill or a stop, the time until the next worker takes the place."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    lease: float
    settings: dict[str, QueueSettings]
    """Per queue, before an operator changes them and after everything is healed."""
    duration: float
    weather: Weather
    workers: list[WorkerPlan]
    clients: list[Machine]
    submissions: list[Submission]
    orders: list[Order]
    faults: list[Fault]


def write_scenario(seed: int) -> Scenario:
    return _Author(f"scenario {seed}").write(seed)


class _Author(random.Random):
    """The seed's random numbers, and scenarios made of them."""

    lease: float
    duration: float

    def write(self, seed: int) -> Scenario:
        # A calm scenario has no faults, only latency and wrong clocks: then no lease may expire at all.
        is_calm = self.random() < 0.2
        self.lease = self.uniform(2.0, 4.0)
        self.duration = self.uniform(5.0, 12.0)
        workers = [self._worker() for _ in range(self.randint(1, 3))]
        clients = [self._machine() for _ in range(self.randint(1, 2))]
        return Scenario(
            seed=seed,
            lease=self.lease,
            settings=self._settings(),
            duration=self.duration,
            weather=self._weather(is_calm),
            workers=workers,
            clients=clients,
            submissions=[self._submission(len(clients)) for _ in range(self.randint(2, 6))],
            orders=[self._order() for _ in range(self.randint(0, 4))],
            faults=[] if is_calm else [self._fault(len(workers)) for _ in range(self.randint(1, 4))],
        )

    def _settings(self) -> dict[str, QueueSettings]:
        limited = QueueSettings(max_inflight=self.randint(1, 2), failure_queue=FAILED)
        return {MAIN: QueueSettings(failure_queue=FAILED), LIMITED: limited}

    def _machine(self) -> Machine:
        return Machine(self.uniform(-3600, 3600), self.uniform(0.999, 1.001))

    def _worker(self) -> WorkerPlan:
        queues = list(QUEUES)
        self.shuffle(queues)
        machine = self._machine()
        options = {
            "queues": tuple(queues[: self.randint(1, 3)]),
            "concurrency": self.randint(1, 3),
            "prefetch": self.choice((0, 0, 5)),
            "poll_interval": self.uniform(0.5, 3.0),
            "grace": self.uniform(0.0, 2.0),
        }
        return WorkerPlan(machine, options)

    def _weather(self, is_calm: bool) -> Weather:
        weather = Weather(slowest=self.choice((0.002, 0.02, 0.1)))
        if not is_calm:
            weather.loss = self.choice((0.0, 0.02, 0.15))
            weather.spikes = self.choice((0.0, 0.0, 0.03))
            weather.spike = self.uniform(0.2, 1.5) * self.lease
        return weather

    def _fault(self, workers: int) -> Fault:
        kind = self.choice(FAULTS)
        at = self.uniform(0.0, self.duration)
        worker = self.randrange(workers)
        return Fault(at=at, kind=kind, worker=worker, seconds=self.uniform(0.2, 2.5) * self.lease)

    def _order(self) -> Order:
        verb = self.choice(VERBS)
        at = self.uniform(0.0, self.duration)
        return Order(at=at, verb=verb, queue=self.choice((MAIN, LIMITED)), which=self.random())

    def _submission(self, clients: int) -> Submission:
        return Submission(
            at=self.uniform(0.0, self.duration * 0.7),
            client=self.randrange(clients),
            requests=tuple(self._request() for _ in range(self.choice((1, 1, 2, 4)))),
            times=self.choice((1, 1, 1, 2)),
        )

    def _request(self) -> JobRequest:
        request = JobRequest(
            type=WORK,
            queue=self.choice((MAIN, MAIN, LIMITED)),
            payload={"acts": self._acts()},
            priority=self.choice((0, 0, 0, 5, -5)),
            max_attempts=self.randint(1, 4),
            backoff=(0.1, self.uniform(0.2, 2.0)),
        )
        kind = self.random()
        if kind < 0.03:
            request.type = ORPHAN
        elif kind < 0.12:
            request.type = TYPED
            request.payload = {"seconds": self.choice((0.05, 0.3, "soon"))}
        if self.random() < 0.25:
            request.delay = self.uniform(0.0, 4.0)
        if self.random() < 0.3:
            request.key = self.choice("ab")
            request.update = self._flags() if self.random() >= 0.4 else None
        if self.random() < 0.25:
            request.idempotency_key = self.choice("xyz")
        if self.random() < 0.15:
            request.timeout = timedelta(seconds=self.uniform(0.1, 1.5))
        if self.random() < 0.2:
            request.max_stalls = self.randint(1, 2)
        return request

    def _flags(self) -> UpdateFlags:
        return UpdateFlags(
            payload=self.random() < 0.5,
            run_at=self.choice(("yes", "no", "later", "earlier")),
            retry=self.random() < 0.5,
            reset_counts=self.random() < 0.5,
        )

    def _acts(self) -> list[tuple[str, float]]:
        """The acts of the executions, one after the other; the last one repeats."""
        passing = [self._act(PASSING_ACTS) for _ in range(self.choice((0, 0, 1, 2)))]
        return [*passing, self._act(LAST_ACTS)]

    def _act(self, choices: tuple[str, ...]) -> tuple[str, float]:
        length = self.choice((0.01, 0.1, 0.1, 0.5, 3.0))
        return self.choice(choices), round(self.uniform(0.2, 1.0) * length * self.lease, 6)
