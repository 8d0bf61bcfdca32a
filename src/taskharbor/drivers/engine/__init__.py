"""The rules of the queue in SQL and Python, as functions of a transaction on a SQLite connection. Nothing here waits, or knows of
threads and files: the driver that calls it begins and commits.

dispatch           which function carries out which call of the contract
enqueue            stores new jobs
reserve            leases the first jobs of the line
settle             ends and extends leases, and ends those that are over
operate            cancels and requeues jobs, configures queues, removes what has ended
inspect            reads jobs, queues and the log
bulk               reads and writes in bulk: streams of the log, blobs, publishing
loaded_jobs        jobs loaded, moved in memory and written back at once, for the cases that need more than one statement
tables             transactions and SQL from `sql/*.sql`, records as rows, queues and their counters
schema_migrations  tables, in numbered steps (`migrations/`)
"""
