"""The kit on the PostgreSQL driver, on the newest server to be had. A URL also runs the cases that kill a process."""

from functools import cache
from pathlib import Path

from conformance.recycled_postgres import Recycler
from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import given_or_shared_postgres


@cache
def _recycler() -> Recycler:
    return Recycler(given_or_shared_postgres())


def _url(tmp_path: Path) -> str:
    return _recycler().fresh_url()


globals().update(conformance_tests(_url))
