"""A deterministic simulation of a whole fleet: clients, workers and a backend under one seeded scheduler.

    python -m taskharbor_testkit.simulation --seeds 1000

The code under test is the real one: `Worker` and `AsyncClient`, on the reference model as the store. Only threads,
clocks, chance and the network are simulated, so a minute of outages, kills and wrong clocks costs milliseconds, and a
failing seed fails again, exactly.

    scheduler    virtual time; simulated threads and processes, which can be frozen and killed
    ledger       the record of every call that takes effect
    backend      the store, and the network that delays and loses calls
    scenario     seed -> processes, requests, faults
    actors       the processes themselves
    guarantees   the guarantees, by name
    world        a run from beginning to end: `simulate(seed) -> Report`
    planted      bugs that must be found
    __main__     runs seeds from the command line
"""

from taskharbor_testkit.simulation.guarantees import GUARANTEES
from taskharbor_testkit.simulation.world import Report, simulate

__all__ = ["GUARANTEES", "Report", "simulate"]
