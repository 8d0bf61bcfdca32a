"""The driver for one machine: every job in one SQLite file, shared by any number of processes. The rules are the engine's.

driver          the handle, and the threads behind all handles on a file: a writer with group commit, and a reader
file            what the URL says, connections, schema and errors of the file
notifications   named pipes that wake other processes
"""

from taskharbor.drivers.sqlite.driver import SQLiteDriver

__all__ = ["SQLiteDriver"]
