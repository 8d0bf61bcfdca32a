"""The rules of the queue in SQL and Python, as functions of a transaction on a SQLite connection. Nothing here waits, or knows of
threads and files: the driver that calls it begins and commits.

dispatch           which function carries out which call of the contract
schema_migrations  tables, in numbered steps (`migrations/`)
tables             transactions and SQL from `sql/*.sql`, records as rows, queues and their counters
enqueue, reserve, settle, operate, inspect, bulk
                   one operation (or family) each
loaded_jobs        jobs loaded, moved in memory and written back at once, for the cases that need more than one statement
"""
