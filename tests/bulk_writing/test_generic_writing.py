"""Writing through the driver contract: the jobs travel to the publisher, and doing it over does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from bulk_harness import NOW, MakeRecord, jobs_in

from taskharbor.bulk.contract import StagingLost
from taskharbor.bulk.generic import GenericStore
from taskharbor.bulk.write_ids import numbered_write
from taskharbor.errors import InvalidRequest


def test_jobs_travel_from_the_task_to_the_publisher(tmp_path: Path, record: MakeRecord) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    write = numbered_write("stream", 0)
    with GenericStore(url) as publisher:
        for attempt in range(2):
            with GenericStore(url) as task:
                jobs = [record(payload=b"%d" % n) for n in range(1200)]
                assert task.stage(write, f"0.{attempt}", [jobs]) == 1200
                carried = task.carry(write, f"0.{attempt}")
            assert carried is not None
            publisher.receive(write, f"0.{attempt}", carried)
            # The same rows of the same partition have the same ids: done over, they are known.
            assert publisher.publish(write, [f"0.{attempt}"], now=NOW) == (0 if attempt else 1200)
    found = jobs_in(url)
    assert sorted(int(job.payload) for job in found.values()) == list(range(1200))


def test_rows_of_different_partitions_and_writes_never_share_an_id(
    tmp_path: Path, record: MakeRecord
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with GenericStore(url) as store:
        for write in ("stream/0", "stream/1"):
            for partition in range(2):
                store.stage(write, f"{partition}.7", [[record()]])
            assert store.publish(write, ["0.7", "1.7"], now=NOW) == 2
    assert len(jobs_in(url)) == 4


def test_what_did_not_arrive_is_not_published(tmp_path: Path, record: MakeRecord) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with GenericStore(url) as store:
        with pytest.raises(StagingLost, match=r"0\.1"):
            store.publish("w", ["0.1"], now=NOW)
        store.stage("w", "0.1", [[record()]])
        store.abandon("w")
        with pytest.raises(StagingLost):
            store.publish("w", ["0.1"], now=NOW)
        with pytest.raises(InvalidRequest, match="by id"):
            store.remove(["x"])
