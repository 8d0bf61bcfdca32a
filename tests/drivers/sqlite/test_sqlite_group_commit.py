"""Group commit: many calls, few syncs; nobody answered before the commit, nobody harmed by a neighbour. Handles that share it,
and processes that wake each other without polling."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from drivers.sqlite.conftest import Query
from records import NOW, make_record
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.engine.tables import Transaction
from taskharbor.drivers.sqlite import SQLiteDriver, notifications
from taskharbor.drivers.sqlite.driver import Database
from taskharbor.drivers.waiting import Notifications
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import SECOND, JobState
from taskharbor_testkit.waits import waits_of


def _database(driver: SQLiteDriver) -> Database:
    assert driver._database is not None
    return driver._database


async def _ready(driver: SQLiteDriver) -> int:
    (stats,) = await driver.stats(now=NOW)
    return stats.counts[JobState.READY]


async def _while_blocked(driver: SQLiteDriver, start: Callable[[], Any]) -> Any:
    """Start calls while the writer is held up, so that they are all queued when it goes on."""
    gate = threading.Event()
    held = asyncio.ensure_future(_database(driver).write(lambda tx: gate.wait(10)))
    started = asyncio.ensure_future(start())
    for _ in range(20):
        await asyncio.sleep(0)
    gate.set()
    await held
    return await started


async def test_enqueues_share_commits_and_a_cancelled_one_stops_nobody(opened: SQLiteDriver) -> None:
    before = _database(opened).commits

    async def start() -> Any:
        doomed = asyncio.ensure_future(opened.enqueue([make_record()], now=NOW))
        await asyncio.sleep(0)
        doomed.cancel()
        return await asyncio.gather(*(opened.enqueue([make_record()], now=NOW) for _ in range(500)))

    await _while_blocked(opened, start)
    assert await _ready(opened) == 500
    # 500 calls in groups of at most 256.
    assert _database(opened).commits - before <= 3


async def test_full_means_full_and_answers_come_after_the_commit(path: Path, query: Query) -> None:
    for options, level in (("", 2), ("?durability=normal", 1)):
        async with SQLiteDriver.from_url(f"sqlite:///{path}{options}") as driver:
            found = await _database(driver).write(
                lambda tx: tx.connection.execute("PRAGMA synchronous").fetchone()
            )
            assert found == (level,)
            for _ in range(20):
                job = make_record()
                await driver.enqueue([job], now=NOW)
                assert query("SELECT count(*) FROM jobs WHERE id = ?", job.id) == [(1,)]


_STRACE = shutil.which("strace")
_PROGRAM = """
import asyncio, sys
from taskharbor.drivers.registry import connect
from taskharbor.requests import new_id
from taskharbor.jobs import JobRecord

async def main():
    async with connect(sys.argv[1]) as driver:
        calls = [
            driver.enqueue([JobRecord(id=new_id(), type="t", run_at_us=0, created_at_us=0)], now=1)
            for _ in range(100)
        ]
        if sys.argv[2] == "together":
            await asyncio.gather(*calls)
        for call in calls if sys.argv[2] == "one by one" else ():
            await call

asyncio.run(main())
"""


@pytest.mark.skipif(_STRACE is None, reason="needs strace")
def test_every_answer_has_its_sync_and_a_group_shares_one(tmp_path: Path) -> None:
    """Counted at the kernel: a killed process cannot show a missing sync, because its page cache survives."""

    def syncs(name: str, how: str) -> int:
        command = [str(_STRACE), "-f", "-c", "-e", "trace=fsync,fdatasync", sys.executable, "-c", _PROGRAM]
        command += [f"sqlite:///{tmp_path}/{name}", how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"strace may not trace here: {done.stderr[-200:]}")
        return sum(map(int, re.findall(r"(\d+) +(?:fsync|fdatasync)$", done.stderr, re.MULTILINE)))

    assert syncs("one.db", "one by one") >= 100
    assert syncs("all.db", "together") < 30
    assert syncs("normal.db?durability=normal", "one by one") < 30


async def test_a_failing_call_takes_no_neighbour_with_it(opened: SQLiteDriver) -> None:
    good = [make_record() for _ in range(10)]

    def fail(tx: Transaction) -> None:
        tx.connection.execute("DELETE FROM jobs")
        raise InvalidRequest("no")

    async def start() -> Any:
        calls: list[Awaitable[object]] = [opened.enqueue([job], now=NOW) for job in good]
        calls.insert(5, _database(opened).write(fail))
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = await _while_blocked(opened, start)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, InvalidRequest)] == [5]
    page = await opened.list_jobs(JobFilter(), now=NOW)
    assert {job.id for job in page.jobs} == {job.id for job in good}


async def test_jobs_reserved_for_a_cancelled_caller_go_back(opened: SQLiteDriver) -> None:
    """Else they would wait for their leases to expire, and count as stalled."""
    await opened.enqueue([make_record() for _ in range(3)], now=NOW)
    before = _database(opened).commits
    call = asyncio.ensure_future(opened.reserve("q", limit=2, lease_for=60 * SECOND, now=NOW, worker="w"))
    await asyncio.sleep(0)
    while _database(opened).commits == before:
        pass
    # It is committed, and the answer cannot arrive while this test has the loop.
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # The release follows the cancellation on its own; looking is the only way to know that it is there.
    while await _ready(opened) < 3:
        pass
    again = await opened.reserve("q", limit=9, lease_for=60 * SECOND, now=NOW, worker="w")
    assert len(again) == 3
    assert {job.stalls for job in again} == {0}


async def test_a_lock_held_too_long_is_an_unavailable_backend(path: Path) -> None:
    async with SQLiteDriver.from_url(f"sqlite:///{path}?busy_timeout=0.05") as driver:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(BackendUnavailable, match="busy_timeout"):
                await driver.enqueue([make_record()], now=NOW)
            # Reading goes on.
            assert await driver.stats(now=NOW) == []
            other.execute("ROLLBACK")
        await driver.enqueue([make_record()], now=NOW)


async def test_a_full_disk_is_an_unavailable_backend_and_loses_nothing(opened: SQLiteDriver) -> None:
    await opened.enqueue([make_record()], now=NOW)

    def limit_pages(tx: Transaction) -> None:
        (pages,) = tx.connection.execute("PRAGMA page_count").fetchone()
        tx.connection.execute(f"PRAGMA max_page_count = {pages}")

    await _database(opened).write(limit_pages)
    with pytest.raises(BackendUnavailable, match="full"):
        await opened.enqueue([make_record(payload=bytes(100_000))], now=NOW)
    assert await _ready(opened) == 1


async def test_clones_share_one_writer_and_the_last_one_closes_it(driver: SQLiteDriver, path: Path) -> None:
    await driver.open()
    twin = driver.clone()
    await twin.open()
    assert _database(driver) is _database(twin)
    await driver.close()
    await driver.close()
    await twin.enqueue([make_record()], now=NOW)
    await twin.close()
    # SQLite removes the WAL when the last connection is closed.
    assert not os.path.exists(f"{path}-wal")
    await driver.open()
    assert len((await driver.list_jobs(JobFilter(), now=NOW)).jobs) == 1
    await driver.close()


async def test_handles_work_from_several_event_loops(opened: SQLiteDriver) -> None:
    async def use() -> None:
        async with opened.clone() as own:
            for _ in range(20):
                await own.enqueue([make_record()], now=NOW)

    await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(use())) for _ in range(4)))
    assert await _ready(opened) == 80


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_a_forked_child_is_told_to_open_again(opened: SQLiteDriver) -> None:
    database = _database(opened)
    database.pid += 1
    with pytest.raises(BackendUnavailable, match="fork"):
        await opened.stats(now=0)
    database.pid -= 1


# -- waking a process that waits, from another process ------------------------------------------------------

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def _pipes(path: Path) -> list[str]:
    folder = Path(f"{path}-notifications")
    return sorted(os.listdir(folder)) if folder.exists() else []


@needs_pipes
async def test_a_process_wakes_us(opened: SQLiteDriver, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The safety net would wake it too, only later.
    monkeypatch.setattr(notifications, "POLL_WITH_PIPE", 60.0)
    waits = waits_of(opened)
    for queue in ("q", "elsewhere"):
        await waits([queue], now=NOW, timeout=0)
    waiter = asyncio.ensure_future(waits(["q"], now=NOW, timeout=50))
    # The first look is done and the pipe open once this second read is answered.
    await asyncio.sleep(0)
    await opened.stats(now=NOW)
    assert len(_pipes(path)) == 1
    command = [sys.executable, "-m", "taskharbor", "enqueue", "mail", "{}", "--queue", "q"]
    process = await asyncio.create_subprocess_exec(*command, "--url", f"sqlite:///{path}")
    assert await process.wait() == 0
    assert await waiter is True
    assert await waits(["elsewhere"], now=NOW, timeout=0) is False


@needs_pipes
async def test_no_pipes_are_needed(opened: SQLiteDriver, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("no pipes here")

    monkeypatch.setattr(os, "mkfifo", refuse)
    await waits_of(opened)(["q"], now=NOW, timeout=0)
    waiter = asyncio.ensure_future(waits_of(opened)(["q"], now=NOW, timeout=30))
    async with SQLiteDriver.from_url(f"sqlite:///{path}") as another:
        # Nobody in this process is told.
        another._database.notifications = Notifications()  # type: ignore[union-attr]
        await another.enqueue([make_record()], now=NOW)
    assert await waiter is True
    assert _pipes(path) == []


async def test_only_an_earlier_job_notifies(opened: SQLiteDriver) -> None:
    await opened.enqueue([make_record(run_at_us=NOW + 100 * SECOND)], now=NOW)
    await waits_of(opened)(["q"], now=NOW, timeout=0)
    await opened.enqueue([make_record(run_at_us=NOW + 200 * SECOND)], now=NOW)
    assert await waits_of(opened)(["q"], now=NOW, timeout=0) is False
    await opened.enqueue([make_record(run_at_us=NOW + 50 * SECOND)], now=NOW)
    assert await waits_of(opened)(["q"], now=NOW, timeout=0) is True


@needs_pipes
async def test_closing_removes_the_pipe_and_those_of_the_dead(driver: SQLiteDriver, path: Path) -> None:
    folder = Path(f"{path}-notifications")
    folder.mkdir()
    # No reader: its owner must be dead.
    os.mkfifo(folder / "1-abandoned")
    notifications.notify_processes(f"{os.path.realpath(path)}-notifications")
    assert _pipes(path) == []
    # A pid that cannot exist: removed when the next pipe is opened.
    os.mkfifo(folder / ".99999999-unfinished")
    async with driver:
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        (own,) = _pipes(path)
        assert own.startswith(f"{os.getpid()}-")
    assert not folder.exists()
