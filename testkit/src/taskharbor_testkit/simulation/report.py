"""`simulate`: one seed, one run, one verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec

from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver
from taskharbor_testkit.simulation.backend import model_driver
from taskharbor_testkit.simulation.guarantees import GUARANTEES, Evidence
from taskharbor_testkit.simulation.ledger import Trace
from taskharbor_testkit.simulation.scenario import write_scenario
from taskharbor_testkit.simulation.world import World


class Violation(msgspec.Struct, frozen=True):
    guarantee: str
    message: str

    def __str__(self) -> str:
        return f"{self.guarantee}: {self.message}"


class Report(msgspec.Struct, kw_only=True):
    """The outcome of one seed. The same seed gives the same report, byte for byte, on any machine."""

    seed: int
    violations: list[Violation]
    trace: Trace
    virtual_seconds: float
    calls: int
    jobs: int
    leases: int
    executions: int
    expired: int

    @property
    def is_ok(self) -> bool:
        return not self.violations

    @property
    def digest(self) -> str:
        return self.trace.digest()

    @property
    def command(self) -> str:
        return f"python -m taskharbor_testkit.simulation --seed {self.seed} --trace"

    def __str__(self) -> str:
        if self.is_ok:
            return f"seed {self.seed}: every guarantee held"
        lines = [f"seed {self.seed}: {len(self.violations)} violations; replay with: {self.command}"]
        return "\n".join([*lines, *(f"  {violation}" for violation in self.violations)])


def simulate(
    seed: int,
    *,
    make_driver: Callable[[Clock], Driver] = model_driver,
    sabotage: AbstractContextManager[object] | None = None,
) -> Report:
    """Run one seed. A planted bug comes in by `make_driver` or by `sabotage`."""
    with _captured_errors() as errors, sabotage or nullcontext():
        world = World(write_scenario(seed), make_driver)
        evidence = world.run()
    evidence.mishaps = [*evidence.mishaps, *errors]
    return Report(
        seed=seed,
        violations=list(judge(evidence)),
        trace=world.trace,
        virtual_seconds=world.scheduler.now,
        calls=world.ledger.number,
        jobs=len(evidence.jobs),
        leases=len(world.ledger.leases),
        executions=len(world.ledger.executions),
        expired=sum(row.error_type == "LeaseExpired" for row in world.ledger.rows),
    )


def judge(evidence: Evidence) -> Iterator[Violation]:
    for name, guarantee in GUARANTEES.items():
        for message in guarantee(evidence):
            yield Violation(name, message)


class _Errors(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(f"logged: {record.getMessage()}")


@contextmanager
def _captured_errors() -> Iterator[list[str]]:
    """A worker's errors are mishaps; its warnings are everyday life here, and not worth formatting."""
    messages: list[str] = []
    handler = _Errors(messages)
    logger = logging.getLogger("taskharbor.worker")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
