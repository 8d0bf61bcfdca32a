"""The driver for one machine: every job in one SQLite file, shared by any number of processes. The rules are the engine's.

driver      the handle: contract calls, clones, waiting
options     what the URL says
database    one writer thread and one reader thread per file and process, with group commit
connection  opening the file, and what its errors mean
migrations  bringing a file's schema up to date
notifications
            a handle's waits, and named pipes that wake other processes
"""

from taskharbor.drivers.sqlite.driver import SQLiteDriver

__all__ = ["SQLiteDriver"]
