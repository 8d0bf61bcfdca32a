"""Whole tables: what a bulk store gives is what the driver contract says, in exactly the declared columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest

from bulk.stores import LOG_KINDS, ODD, add, attempts_of, fill, fresh_url, jobs_of, rows, selected, within
from taskharbor.bulk import store as bulk_store
from taskharbor.bulk.store import BulkStore, open_store
from taskharbor.bulk.tables import SCHEMAS, Selection, Table
from taskharbor.drivers.postgres import bulk as reading
from taskharbor.errors import BackendUnavailable, SchemaMismatch
from taskharbor.jobs import JobState


@pytest.fixture(scope="module", params=LOG_KINDS)
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BulkStore]:
    """A store with a bit of everything, for tests that only read."""
    with fresh_url(request.param, tmp_path_factory.mktemp("filled")) as url:
        within(url, fill)
        with open_store(url) as store:
            yield store


def test_attempts_and_jobs_are_those_of_the_driver(filled: BulkStore) -> None:
    by_seq = itemgetter("seq")
    attempts = selected(filled, "attempts")
    assert sorted(attempts, key=by_seq) == sorted(within(filled.url, attempts_of), key=by_seq)
    assert len(attempts) == 4
    found = {row["id"]: row for row in selected(filled, "jobs")}
    expected = {row["id"]: row for row in within(filled.url, jobs_of)}
    assert found.keys() == expected.keys()
    for job_id, row in found.items():
        row["expires_at_us"] = row.pop("lease_expires_at_us")
        headers = row.pop("headers")
        assert (headers is None) == (not expected[job_id]["headers"])
        assert row == {name: expected[job_id][name] for name in row}
    states = Counter(row["state"] for row in found.values())
    assert states == Counter(JobState) + Counter([JobState.SCHEDULED, JobState.READY])


def test_queues_are_those_of_the_driver(filled: BulkStore) -> None:
    found = {row["queue"]: row for row in selected(filled, "queues")}
    assert found.keys() == {"a", "b"}
    assert [found["a"][name] for name in ("done", "dead_total", "inflight")] == [1, 1, 1]
    assert [found["b"][name] for name in ("paused", "max_inflight", "failure_queue")] == [True, 7, "graves"]
    assert selected(filled, "queues", Selection(queue="b")) == [found["b"]]


def test_every_batch_has_the_declared_schema(filled: BulkStore) -> None:
    for table, schema in SCHEMAS.items():
        batches = [b for part in filled.parts(table, Selection(), parallelism=2) for b in filled.read(part)]
        assert batches
        for batch in batches:
            assert batch.schema.equals(schema, check_metadata=True)
            batch.validate(full=True)


@pytest.mark.parametrize(
    ("table", "selection", "expected"),
    [
        ("jobs", Selection(queue="b"), {"cancelled", "due soon"}),
        ("jobs", Selection(type=ODD), {"dead"}),
        ("jobs", Selection(state=JobState.DEAD), {"dead"}),
        ("jobs", Selection(state=JobState.SCHEDULED), {"scheduled", "retried"}),
        ("jobs", Selection(state=JobState.READY, queue="b"), {"due soon"}),
        ("jobs", Selection(queue="nobody's"), set()),
        ("attempts", Selection(queue="a", type="mail"), {"retried", "done"}),
        ("attempts", Selection(state=JobState.CANCELLED), {"cancelled"}),
        ("attempts", Selection(queue="nobody's"), set()),
    ],
)
def test_rows_are_selected(filled: BulkStore, table: Table, selection: Selection, expected: set[str]) -> None:
    column = "id" if table == "jobs" else "job_id"
    assert {row[column] for row in selected(filled, table, selection)} == expected


def test_instants_select_from_the_first_on_and_before_the_second(filled: BulkStore) -> None:
    early, late = sorted({job["created_at_us"] for job in within(filled.url, jobs_of)})
    for since, until, expected in ((early, late, 1), (late, None, 8), (None, early, 0), (early, late + 1, 9)):
        assert len(selected(filled, "jobs", Selection(since_us=since, until_us=until))) == expected
    ended = [one["ended_at_us"] for one in within(filled.url, attempts_of)]
    last = Selection(since_us=max(ended), until_us=max(ended) + 1)
    assert len(selected(filled, "attempts", last)) == ended.count(max(ended)) == 3


@pytest.mark.parametrize("kind", LOG_KINDS, indirect=True)
def test_many_rows_are_read_in_parallel_and_each_once(
    store: BulkStore, url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"ROWS_PER_PART": 160, "JOBS_PER_PART": 100, "_PAGE": 60}.items():
        monkeypatch.setattr(bulk_store, name, size)
    monkeypatch.setattr(reading, "_BLOCKS_PER_PART", 2)
    monkeypatch.setattr(reading, "_BLOCKS_PER_STATEMENT", 3)
    add(url, 800)
    parts = store.parts("attempts", Selection(), parallelism=4)
    within(url, fill)
    seqs = [row["seq"] for row in rows(store, parts)]
    # What came after the plan is not in it.
    assert len(seqs) == len(set(seqs)) == 800
    assert len(selected(store, "attempts")) == 804
    planned = store.parts("jobs", Selection(), parallelism=4)
    assert len(parts) == len(planned) == 4
    by_part = [[row["id"] for row in rows(store, [part])] for part in planned]
    assert kind == "memory" or max(map(len, by_part)) < 400
    found = Counter(job_id for part in by_part for job_id in part)
    assert set(found.values()) == {1}
    assert len(found) == 809


def test_an_empty_store_has_parts_without_rows(store: BulkStore, url: str) -> None:
    within(url, lambda driver: driver.time())
    for table in SCHEMAS:
        parts = store.parts(table, Selection(), parallelism=4)
        assert parts
        assert rows(store, parts) == []


def test_a_missing_store_is_not_made_and_its_password_in_no_error(tmp_path: Path, postgres_url: str) -> None:
    for url, kind, words in (
        (f"sqlite:///{tmp_path}/nothing.db", BackendUnavailable, "no such store"),
        (f"file://{tmp_path}/nothing", BackendUnavailable, "no such store"),
        (postgres_url, SchemaMismatch, "taskharbor migrate"),
        ("postgresql://me:secret@127.0.0.1:1/jobs", BackendUnavailable, r"127\.0\.0\.1:1"),
    ):
        with open_store(url) as store, pytest.raises(kind, match=words) as error:
            selected(store, "attempts")
        assert "secret" not in str(error.value)
    assert not list(tmp_path.iterdir())
