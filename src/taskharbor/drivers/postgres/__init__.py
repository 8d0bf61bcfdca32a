"""The PostgreSQL driver: `postgresql://user@host/database`. Needs the extra `taskharbor[postgres]`.

In the order in which a call passes through them:

- `options`: reads the URL.
- `driver`: the contract, and notifications for waiters.
- `enqueue`, `leases`, `operate`, `log`: one module per kind of call.
- `transactions`: enqueues within transactions of the caller.
- `rows`: loads `sql/`, and turns records into columns and back.
- `connections`: runs statements.
- `migrations`: installs `schema/` (tables) and `functions/` (the rules).
- `bulk`: reads and writes whole tables.
"""

from taskharbor.drivers.postgres.driver import PostgresDriver

__all__ = ["PostgresDriver"]
