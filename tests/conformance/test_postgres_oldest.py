"""The kit on the oldest PostgreSQL to be had: what a newer server forgives shows here."""

from functools import cache
from pathlib import Path

from conformance.recycled_postgres import Recycler
from taskharbor_testkit.conformance import conformance_tests
from taskharbor_testkit.servers import postgres_versions, shared_postgres


@cache
def _recycler() -> Recycler:
    return Recycler(shared_postgres(min(postgres_versions(), default=None)))


def _url(tmp_path: Path) -> str:
    return _recycler().fresh_url()


globals().update(conformance_tests(_url, share=1 / 3))
