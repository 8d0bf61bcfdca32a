"""The driver for one process: tests, simulations, and programs whose jobs may die with them.

It is also the reference: the contract's rules in their plainest form, which every other driver must agree with.

    driver     the handle: contract calls, clones, waiting
    producing  the store: how jobs come in,
    settling   how leases end,
    leasing    how they begin,
    operating  and what an operator does
    queues     one queue: its lines and keys
    log        the attempt log
    copies     records in and out, changes by key
    lines      the containers
"""

from taskharbor.drivers.memory.driver import MemoryDriver, MemoryStore

__all__ = ["MemoryDriver", "MemoryStore"]
