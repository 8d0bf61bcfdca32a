"""The driver for one machine: every job in one SQLite file, shared by any number of processes.

driver      the handle: contract calls, clones, waiting
options     what the URL says
database    one writer thread and one reader thread per file and process, with group commit
connection  opening the file, and what its errors mean
migrations  the schema, in numbered steps
statements  SQL from `sql/*.sql`
queues      queues by name and by number
counts      counters per queue and state
rows        records to rows and back
enqueue, reserve, settle, reclaim, operate, remove, inspect
            one operation (or family) each, as functions of a transaction
unit        jobs loaded, moved in memory and written back at once: what the odd cases share
job         one job as a unit holds it
notifications
            a handle's waits, and named pipes that wake other processes
"""

from taskharbor.drivers.sqlite.driver import SQLiteDriver

__all__ = ["SQLiteDriver"]
