"""The PostgreSQL driver: `postgresql://user@host/database`. Needs the extra `taskharbor[postgres]`."""

from taskharbor.drivers.postgres.driver import PostgresDriver

__all__ = ["PostgresDriver"]
