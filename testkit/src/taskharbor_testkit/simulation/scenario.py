"""From a seed to a story: who is there, what they ask for, and what goes wrong when. Pure data, decided beforehand."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Literal, TypeAlias

import msgspec

from taskharbor.jobs import JobRequest, UpdateFlags
from taskharbor_testkit.simulation.network import Weather

MAIN, LIMITED, FAILED = "main", "limited", "failed"
QUEUES = (MAIN, LIMITED, FAILED)

WORK, TYPED, ORPHAN = "work", "typed", "orphan"
"""Ordinary jobs, jobs whose payload is validated, jobs nobody has a handler for."""

FaultKind: TypeAlias = Literal["kill", "stop", "freeze", "stall", "outage"]
Verb: TypeAlias = Literal["cancel", "requeue", "pause", "resume", "limit"]


class Machine(msgspec.Struct, frozen=True):
    """How wrong a machine's clock is."""

    offset: float
    rate: float


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    queues: tuple[str, ...]
    concurrency: int
    prefetch: int
    poll_interval: float
    grace: float


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A client sends a batch, once or several times over."""

    at: float
    client: int
    requests: tuple[JobRequest, ...]
    times: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An operator steps in. `which` picks a job or a limit, as a share of what there is."""

    at: float
    verb: Verb
    queue: str
    which: float


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    kind: FaultKind
    worker: int
    seconds: float
    """How long it lasts; for a kill or a stop, how long until the next worker takes the place."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    is_calm: bool
    """No faults, only latency and wrong clocks: then no lease may run out at all."""
    lease: float
    limit: int
    """W of the limited queue."""
    duration: float
    weather: Weather
    workers: tuple[WorkerPlan, ...]
    clients: tuple[Machine, ...]
    submissions: tuple[Submission, ...]
    orders: tuple[Order, ...]
    faults: tuple[Fault, ...]


def write_scenario(seed: int) -> Scenario:
    return _Author(seed).write()


class _Author:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"scenario {seed}")
        self._seed = seed
        self._is_calm = self._rng.random() < 0.2
        self._lease = self._rng.uniform(2.0, 4.0)
        self._duration = self._rng.uniform(5.0, 12.0)

    def write(self) -> Scenario:
        rng = self._rng
        workers = tuple(self._worker() for _ in range(rng.randint(1, 3)))
        clients = tuple(self._machine() for _ in range(rng.randint(1, 2)))
        return Scenario(
            seed=self._seed,
            is_calm=self._is_calm,
            lease=self._lease,
            limit=rng.randint(1, 2),
            duration=self._duration,
            weather=self._weather(),
            workers=workers,
            clients=clients,
            submissions=tuple(self._submission(len(clients)) for _ in range(rng.randint(2, 6))),
            orders=tuple(self._order() for _ in range(rng.randint(0, 4))),
            faults=()
            if self._is_calm
            else tuple(self._fault(len(workers)) for _ in range(rng.randint(1, 4))),
        )

    def _machine(self) -> Machine:
        return Machine(self._rng.uniform(-3600, 3600), self._rng.uniform(0.999, 1.001))

    def _worker(self) -> WorkerPlan:
        rng = self._rng
        queues = list(QUEUES)
        rng.shuffle(queues)
        return WorkerPlan(
            machine=self._machine(),
            queues=tuple(queues[: rng.randint(1, 3)]),
            concurrency=rng.randint(1, 3),
            prefetch=rng.choice((0, 0, 5)),
            poll_interval=rng.uniform(0.5, 3.0),
            grace=rng.uniform(0.0, 2.0),
        )

    def _weather(self) -> Weather:
        rng = self._rng
        slowest = rng.choice((0.002, 0.02, 0.1))
        if self._is_calm:
            return Weather(slowest=slowest)
        return Weather(
            slowest=slowest,
            loss=rng.choice((0.0, 0.02, 0.15)),
            spikes=rng.choice((0.0, 0.0, 0.03)),
            spike=rng.uniform(0.2, 1.5) * self._lease,
        )

    def _fault(self, workers: int) -> Fault:
        rng = self._rng
        kind: FaultKind = rng.choice(("kill", "kill", "stop", "freeze", "freeze", "stall", "outage"))
        return Fault(
            at=rng.uniform(0.0, self._duration),
            kind=kind,
            worker=rng.randrange(workers),
            seconds=rng.uniform(0.2, 2.5) * self._lease,
        )

    def _order(self) -> Order:
        rng = self._rng
        verb: Verb = rng.choice(("cancel", "cancel", "requeue", "pause", "resume", "limit"))
        return Order(
            at=rng.uniform(0.0, self._duration),
            verb=verb,
            queue=rng.choice((MAIN, LIMITED)),
            which=rng.random(),
        )

    # -- jobs ---------------------------------------------------------------------------------------------

    def _submission(self, clients: int) -> Submission:
        rng = self._rng
        return Submission(
            at=rng.uniform(0.0, self._duration * 0.7),
            client=rng.randrange(clients),
            requests=tuple(self._request() for _ in range(rng.choice((1, 1, 2, 4)))),
            times=rng.choice((1, 1, 1, 2)),
        )

    def _request(self) -> JobRequest:
        rng = self._rng
        request = JobRequest(
            type=WORK,
            queue=rng.choice((MAIN, MAIN, LIMITED)),
            payload={"acts": self._acts()},
            priority=rng.choice((0, 0, 0, 5, -5)),
            max_attempts=rng.randint(1, 4),
            backoff=(0.1, rng.uniform(0.2, 2.0)),
        )
        kind = rng.random()
        if kind < 0.03:
            request.type = ORPHAN
        elif kind < 0.12:
            request.type = TYPED
            request.payload = {"seconds": rng.choice((0.05, 0.3, "soon"))}
        if rng.random() < 0.25:
            request.delay = rng.uniform(0.0, 4.0)
        if rng.random() < 0.3:
            request.key = rng.choice("ab")
            request.update = self._flags()
        if rng.random() < 0.25:
            request.idempotency_key = rng.choice("xyz")
        if rng.random() < 0.15:
            request.timeout = timedelta(seconds=rng.uniform(0.1, 1.5))
        if rng.random() < 0.2:
            request.max_stalls = rng.randint(1, 2)
        return request

    def _flags(self) -> UpdateFlags | None:
        rng = self._rng
        if rng.random() < 0.4:
            return None
        return UpdateFlags(
            payload=rng.random() < 0.5,
            run_at=rng.choice(("yes", "no", "later", "earlier")),
            retry=rng.random() < 0.5,
            reset_counts=rng.random() < 0.5,
        )

    def _acts(self) -> list[tuple[str, float]]:
        """The acts of the executions, one after the other; the last one repeats."""
        rng = self._rng
        passing = [
            self._act(("raise", "retry", "snooze", "quit", "stubborn"))
            for _ in range(rng.choice((0, 0, 1, 2)))
        ]
        return [*passing, self._act(("return", "return", "return", "raise", "give_up", "discard", "block"))]

    def _act(self, choices: tuple[str, ...]) -> tuple[str, float]:
        rng = self._rng
        length = rng.choice((0.01, 0.1, 0.1, 0.5, 3.0))
        return rng.choice(choices), round(rng.uniform(0.2, 1.0) * length * self._lease, 6)
