"""The driver for one machine: every job in one SQLite file, shared by any number of processes. The rules are the engine's.

driver      the handle: contract calls, clones, waiting, and named pipes that wake other processes
options     what the URL says
database    the file: opening it, its schema, one writer thread and one reader thread per process, with group commit
"""

from taskharbor.drivers.sqlite.driver import SQLiteDriver

__all__ = ["SQLiteDriver"]
