"""The kit on every driver and server, one row of the table for each. (On the memory driver: `test_memory.py`.)

The id of a test begins with the name of its row: `test_conformance[postgres-...]`. A row with a URL also runs the cases that
kill a process. The second value of a row is the share of its usual histories that the state machine tries.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.recycled_postgres import recycler
from conformance.through_broker import ThroughBroker
from conformance.tiny_segments import tiny_segments
from taskharbor_testkit import servers
from taskharbor_testkit.conformance import CASES, Backend
from taskharbor_testkit.conformance.backend import Factory, as_backend
from taskharbor_testkit.conformance.case import Skip, run_case
from taskharbor_testkit.conformance.machine import Effort, run_machine
from taskharbor_testkit.servers.s3 import fresh_s3_url

_WITHOUT_FUNCTIONS = ("on", ">secret", "~*", "&*", "+@all", "-fcall", "-fcall_ro", "-function")


def redis_without_functions() -> str:
    """A server that refuses functions to its user: the library's text runs by EVAL."""
    server = servers.shared_redis()
    server.execute("ACL", "SETUSER", "without_functions", *_WITHOUT_FUNCTIONS)
    return servers.with_fresh_prefix(server.url).replace("redis://", "redis://without_functions:secret@")


def newest_redis() -> str:
    return servers.with_fresh_prefix(servers.given_or_shared_redis().url)


ROWS: dict[str, tuple[Backend | Factory | str, float, list[pytest.MarkDecorator]]] = {
    "sqlite": (lambda path: f"sqlite:///{path}/jobs.db", 1 / 3, []),
    "postgres": (lambda: recycler().fresh_url(), 1 / 3, []),
    # What a newer server forgives shows here.
    "postgres_oldest": (lambda: recycler(oldest=True).fresh_url(), 1 / 3, [pytest.mark.slow]),
    "redis": (newest_redis, 1 / 3, []),
    "redis_oldest": (
        lambda: servers.with_fresh_prefix(servers.shared_redis("7.0").url),
        1 / 3,
        [pytest.mark.installed],
    ),
    "redis_eval": (redis_without_functions, 1 / 3, [pytest.mark.slow]),
    # Every queue lives on the node that its name leads to.
    "redis_cluster": (
        lambda: servers.with_fresh_prefix(servers.shared_redis_cluster().url),
        1 / 3,
        [pytest.mark.slow],
    ),
    "tiny_segments": (tiny_segments, 1 / 3, []),
    # Every handle is a writer of its own.
    "mem": ("mem://{fresh}", 1, [pytest.mark.slow]),
    "file": (lambda path: f"file://{path}/store", 1 / 3, [pytest.mark.slow]),
    # Every look at a store is dozens of requests to a server written in Python.
    "s3": (lambda: fresh_s3_url(), 1 / 5, [pytest.mark.slow]),
    "http_sqlite": (ThroughBroker(lambda path: f"sqlite:///{path}/jobs.db"), 1 / 3, []),
    "http_postgres": (ThroughBroker(lambda path: recycler().fresh_url()), 1 / 3, [pytest.mark.slow]),
    "http_redis": (ThroughBroker(lambda path: newest_redis()), 1 / 3, [pytest.mark.slow]),
    # A folder with real compare-and-swap.
    "http_file": (ThroughBroker(lambda path: f"file://{path}/store"), 1 / 3, [pytest.mark.slow]),
    "http_mem": (ThroughBroker(lambda path: "mem://"), 1 / 3, [pytest.mark.slow]),
    "http_s3": (ThroughBroker(lambda path: fresh_s3_url()), 1 / 3, [pytest.mark.slow]),
}


# Every queue of an object store is an object of its own, and 300 of them take some seconds.
SLOW = {("tiny_segments", "large.many_queues_are_counted_pruned_and_watched")}


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(
            as_backend(one),
            case,
            id=f"{name}-{case}",
            marks=[*marks, *[pytest.mark.slow] * ((name, case) in SLOW)],
        )
        for name, (one, _, marks) in ROWS.items()
        for case in CASES
    ],
)
def test_conformance(backend: Backend, case: str, tmp_path: Path) -> None:
    try:
        run_case(CASES[case], backend, tmp_path)
    except Skip as skip:
        pytest.skip(str(skip))


@pytest.mark.parametrize(
    ("backend", "share"),
    [
        pytest.param(as_backend(one), share, id=name, marks=marks)
        for name, (one, share, marks) in ROWS.items()
    ],
)
def test_state_machine(backend: Backend, share: float) -> None:
    run_machine(backend, Effort.from_environment(share))
