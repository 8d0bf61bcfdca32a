"""The PostgreSQL driver: `postgresql://user@host/database`. Needs the extra `taskharbor[postgres]`.

`options` reads the URL, and `driver` carries out the contract's calls: by `enqueue`, `leases`, `operate` and `log`.
`transactions` enqueues within transactions of the caller's, `notifications` wakes who waits. `rows` loads `sql/` and turns
records into columns and back, `connections` runs statements. `migrations` installs `schema/` (tables) and `functions/` (the
rules). `bulk` reads and writes whole tables.
"""

from taskharbor.drivers.postgres.driver import PostgresDriver

__all__ = ["PostgresDriver"]
