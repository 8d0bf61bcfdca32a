"""The kit on the PostgreSQL driver: on the newest server to be had, and on the oldest."""

from pathlib import Path

from taskharbor.conformance import conformance_tests
from taskharbor.testing.servers.shared import shared_postgres, with_fresh_schema


def _url(tmp_path: Path) -> str:
    return with_fresh_schema(shared_postgres().url)


globals().update(conformance_tests(_url))
