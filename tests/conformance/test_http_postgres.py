"""The kit on the HTTP driver, by way of a broker over PostgreSQL."""

from functools import cache
from pathlib import Path

from conformance.recycled_postgres import Recycler
from conformance.through_broker import conformance_through_broker
from taskharbor_testkit.servers import given_or_shared_postgres


@cache
def _recycler() -> Recycler:
    return Recycler(given_or_shared_postgres())


def _url(directory: Path) -> str:
    return _recycler().fresh_url()


globals().update(conformance_through_broker(_url))
