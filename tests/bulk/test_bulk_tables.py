"""Whole tables: what a bulk store gives is what the driver contract says, in exactly the declared columns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from bulk.bulk_history import attempts_of, fill, finish, jobs_of, rows, within
from taskharbor.bulk import read
from taskharbor.bulk.store import BulkStore, DriverStore, open_store
from taskharbor.bulk.tables import SCHEMAS, Selection
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.postgres import bulk as reading
from taskharbor.drivers.postgres.bulk import PostgresBulkStore
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import JobState

EVERYTHING = Selection()


async def _finish(driver: Driver, count: int, name: str = "p") -> None:
    await finish(driver, count, now=await driver.time(), name=name)


def test_postgres_alone_has_a_store_of_its_own() -> None:
    for url in ("sqlite:///jobs.db", "redis://host", "file:///folder", "memory://", "http://broker"):
        with open_store(url) as store:
            assert isinstance(store, DriverStore)
    with open_store("postgresql://host/database") as postgres:
        assert isinstance(postgres, PostgresBulkStore)


def test_attempts_are_those_of_the_driver(store: BulkStore, url: str) -> None:
    within(url, fill)
    found = rows(store, store.parts("attempts", EVERYTHING, parallelism=4))
    expected = within(url, attempts_of)
    assert sorted(found, key=lambda row: row["seq"]) == sorted(expected, key=lambda row: row["seq"])
    assert len(found) == 4


def test_jobs_are_those_of_the_driver(store: BulkStore, url: str) -> None:
    within(url, fill)
    found = {row["id"]: row for row in rows(store, store.parts("jobs", EVERYTHING, parallelism=4))}
    expected = {row["id"]: row for row in within(url, jobs_of)}
    assert found.keys() == expected.keys()
    for job_id, row in found.items():
        row["expires_at_us"] = row.pop("lease_expires_at_us")
        headers = row.pop("headers")
        assert (headers is None) == (not expected[job_id]["headers"])
        assert row == {name: expected[job_id][name] for name in row}
    assert Counter(row["state"] for row in found.values()) == {
        "scheduled": 2, "ready": 2, "blocked": 1, "inflight": 1, "done": 1, "dead": 1, "cancelled": 1,
    }  # fmt: skip


def test_queues_are_those_of_the_driver(store: BulkStore, url: str) -> None:
    within(url, fill)
    found = {row["queue"]: row for row in rows(store, store.parts("queues", EVERYTHING, parallelism=4))}
    assert found.keys() == {"a", "b"}
    assert (found["a"]["done"], found["a"]["dead_total"], found["a"]["inflight"]) == (1, 1, 1)
    assert (found["b"]["paused"], found["b"]["max_inflight"], found["b"]["failure_queue"]) == (
        True,
        7,
        "graves",
    )
    (alone,) = rows(store, store.parts("queues", Selection(queue="b"), parallelism=1))
    assert alone == found["b"]


def test_every_batch_has_the_declared_schema(store: BulkStore, url: str) -> None:
    within(url, fill)
    for table, schema in SCHEMAS.items():
        batches = [b for part in store.parts(table, EVERYTHING, parallelism=2) for b in store.read(part)]
        assert batches
        for batch in batches:
            assert batch.schema.equals(schema, check_metadata=True)
            batch.validate(full=True)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(queue="b"), {"cancelled", "due soon"}),
        (Selection(type='it\'s \\ 100 % "odd" ☂'), {"dead"}),
        (Selection(state=JobState.DEAD), {"dead"}),
        (Selection(state=JobState.SCHEDULED), {"scheduled", "retried"}),
        (Selection(state=JobState.READY, queue="b"), {"due soon"}),
        (Selection(queue="nobody's"), set()),
    ],
)
def test_jobs_can_be_selected(store: BulkStore, url: str, selection: Selection, expected: set[str]) -> None:
    within(url, fill)
    assert {row["id"] for row in rows(store, store.parts("jobs", selection, parallelism=2))} == expected


def test_instants_select_from_the_first_on_and_before_the_second(store: BulkStore, url: str) -> None:
    within(url, fill)
    jobs = within(url, jobs_of)
    early, late = sorted({job["created_at_us"] for job in jobs})
    for since, until, expected in ((early, late, 1), (late, None, 8), (None, early, 0), (early, late + 1, 9)):
        selection = Selection(since_us=since, until_us=until)
        assert len(rows(store, store.parts("jobs", selection, parallelism=2))) == expected
    ended = [one["ended_at_us"] for one in within(url, attempts_of)]
    last = Selection(since_us=max(ended), until_us=max(ended) + 1)
    assert len(rows(store, store.parts("attempts", last, parallelism=2))) == ended.count(max(ended)) == 3


def test_attempts_can_be_selected(store: BulkStore, url: str) -> None:
    within(url, fill)
    for selection, expected in (
        (Selection(queue="a", type="mail"), {"retried", "done"}),
        (Selection(state=JobState.CANCELLED), {"cancelled"}),
        (Selection(queue="nobody's"), set()),
    ):
        found = rows(store, store.parts("attempts", selection, parallelism=2))
        assert {row["job_id"] for row in found} == expected


def test_parts_cover_the_log_once_and_share_it_out(
    store: BulkStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCKS_PER_PART", 4)
    monkeypatch.setattr(reading, "_BLOCKS_PER_STATEMENT", 3)
    monkeypatch.setattr(read, "ROWS_PER_PART", 400)
    monkeypatch.setattr(read, "_PAGE", 150)
    within(url, lambda driver: _finish(driver, 2_000))
    parts = store.parts("attempts", EVERYTHING, parallelism=4)
    found = [row["seq"] for row in rows(store, parts)]
    assert len(found) == len(set(found)) == 2_000
    assert len(parts) == 4


def test_a_planned_read_of_the_log_shows_what_was_there_then(store: BulkStore, url: str, kind: str) -> None:
    within(url, lambda driver: _finish(driver, 100))
    parts = store.parts("attempts", EVERYTHING, parallelism=4)
    within(url, lambda driver: _finish(driver, 100, name="later"))
    assert len(rows(store, parts)) == 100
    assert len(rows(store, store.parts("attempts", EVERYTHING, parallelism=4))) == 200


def test_an_empty_store_has_parts_without_rows(store: BulkStore, url: str) -> None:
    within(url, lambda driver: driver.time())
    for table in SCHEMAS:
        parts = store.parts(table, EVERYTHING, parallelism=4)
        assert parts
        assert rows(store, parts) == []


def test_many_finished_jobs_are_read_in_parallel_and_each_once(
    store: BulkStore, url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_BLOCKS_PER_PART", 4)
    monkeypatch.setattr(read, "JOBS_PER_PART", 100)
    within(url, lambda driver: _finish(driver, 2_000))
    within(url, fill)
    parts = store.parts("jobs", EVERYTHING, parallelism=4)
    assert len(parts) == 4
    by_part = [[row["id"] for row in rows(store, [part])] for part in parts]
    if kind != "memory":
        assert max(map(len, by_part)) < 1_000
    found = Counter(job_id for part in by_part for job_id in part)
    assert set(found.values()) == {1}
    assert len(found) == 2_009


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/nothing.db", f"file://{tmp_path}/nothing"):
        with open_store(url) as store:
            for table in ("attempts", "queues"):
                with pytest.raises(BackendUnavailable, match="no such store"):
                    rows(store, store.parts(table, EVERYTHING, parallelism=1))
    assert not list(tmp_path.iterdir())


def test_a_schema_that_is_not_there_is_named(postgres_url: str) -> None:
    with open_store(postgres_url) as store, pytest.raises(SchemaMismatch, match="taskharbor migrate"):
        store.parts("attempts", EVERYTHING, parallelism=1)


def test_a_password_is_in_no_message() -> None:
    with open_store("postgresql://me:secret@127.0.0.1:1/jobs") as store:
        with pytest.raises(BackendUnavailable) as error:
            store.latest()
        assert "secret" not in str(error.value)
