"""A deterministic simulation of a whole fleet: clients, workers and a backend under one seeded scheduler.

    python -m taskharbor_testkit.simulation --seeds 1000

The code under test is the real one: `Worker` and `AsyncClient`, on the reference model as the store. Only threads,
clocks, chance and the network are simulated, so a minute of outages, kills and wrong clocks costs milliseconds, and a
failing seed fails again, exactly.

    scheduler, loop    virtual time; one event loop per simulated thread
    process, network   what can be frozen, killed, delayed and lost
    backend, ledger    the store, and the record of every call that takes effect in it
    scenario           seed -> who is there, what they ask for, what goes wrong
    handlers, actors   the processes themselves
    world              a run from beginning to end
    guarantees         what must hold, by name
    report             `simulate(seed) -> Report`
    planted            bugs that must be found
"""

from taskharbor_testkit.simulation.guarantees import GUARANTEES
from taskharbor_testkit.simulation.report import Report, Violation, simulate

__all__ = ["GUARANTEES", "Report", "Violation", "simulate"]
