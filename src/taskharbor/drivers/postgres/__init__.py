"""The PostgreSQL driver: `postgresql://user@host/database`. Needs the extra `taskharbor[postgres]`.

`options` reads the URL, and `driver` carries out the contract's calls: by `enqueue`, `reserve`, `settle`, `operate`, `inspect`,
`log` and `blobs`. `transactions` enqueues within transactions of the caller's. `notify_throttle` and `listener` wake who waits.
`rows` turns records into columns and back, `statements` loads `sql/`, `connections` runs statements, `failures` says what errors
mean. `migrations` installs `schema/` (tables) and `functions/` (the rules). `bulk` reads and writes whole tables.
"""

from taskharbor.drivers.postgres.driver import PostgresDriver

__all__ = ["PostgresDriver"]
