"""A bulk store of every kind, with a look behind its back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from bulk.stores import KINDS, Behind, BehindBlobs, BehindPostgres, fresh_url
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.drivers.postgres.options import parse_url


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    with fresh_url(kind, tmp_path) as url:
        yield url


@pytest.fixture
def store(url: str, kind: str) -> Iterator[BulkStore]:
    # As brokers and the command line write to PostgreSQL.
    with BulkStore(url) if kind.endswith("by the contract") else open_store(url) as store:
        yield store


@pytest.fixture
def behind(url: str, kind: str) -> Iterator[Behind]:
    with BehindPostgres(parse_url(url)) if kind == "postgres" else nullcontext(BehindBlobs(url)) as behind:
        yield behind
