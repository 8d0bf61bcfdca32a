"""Waking a process that waits, from another process, without polling."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from records import NOW, make_record
from taskharbor.drivers.contract import QueueSettings
from taskharbor.drivers.sqlite import SQLiteDriver, notifications
from taskharbor.jobs import SECOND
from taskharbor_testkit.waits import waits_of

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")

_PRODUCER = """
import asyncio, sys
from taskharbor.drivers.registry import connect
from taskharbor.requests import new_id
from taskharbor.jobs import JobRecord

async def main():
    async with connect(sys.argv[1]) as driver:
        print("ready", flush=True)
        sys.stdin.readline()
        record = JobRecord(id=new_id(), type="t", queue=sys.argv[2], run_at_us=0, created_at_us=0)
        await driver.enqueue([record], now=1)

asyncio.run(main())
"""


def _pipes(path: Path) -> list[str]:
    folder = Path(f"{path}-notifications")
    return sorted(os.listdir(folder)) if folder.exists() else []


async def _producer(path: Path, queue: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PRODUCER,
        f"sqlite:///{path}",
        queue,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_another_process_wakes_a_waiter(
    driver: SQLiteDriver, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The safety net would wake it too, only later.
    monkeypatch.setattr(notifications, "POLL_WITH_PIPE", 60.0)

    async with driver:
        process = await _producer(path, "q")
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        waiter = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=30))
        # The first look is done and the pipe open once this second read is answered.
        await asyncio.sleep(0)
        await driver.stats(now=NOW)
        assert len(_pipes(path)) == 1
        start = time.monotonic()
        await process.communicate(b"go\n")
        assert await waiter is True
        assert time.monotonic() - start < 20
        assert process.returncode == 0


async def test_a_job_for_another_queue_does_not_wake(driver: SQLiteDriver, path: Path) -> None:
    async with driver:
        process = await _producer(path, "elsewhere")
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        waiter = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=0.5))
        await process.communicate(b"go\n")
        assert await waiter is False


async def test_a_wake_up_between_two_waits_is_not_missed(driver: SQLiteDriver) -> None:
    async with driver:
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        assert await waits_of(driver)(["q"], now=NOW, timeout=0) is False
        await driver.enqueue([make_record()], now=NOW)
        assert await waits_of(driver)(["q"], now=NOW, timeout=30) is True
        assert await waits_of(driver)(["q"], now=NOW, timeout=0) is False


async def test_every_handle_is_notified(driver: SQLiteDriver) -> None:
    async with driver, driver.clone() as second, driver.clone() as third:
        handles = [second, third]
        for one in handles:
            await waits_of(one)(["q"], now=NOW, timeout=0)
        waiters = [asyncio.ensure_future(waits_of(one)(["q"], now=NOW, timeout=30)) for one in handles]
        await driver.enqueue([make_record()], now=NOW)
        assert await asyncio.gather(*waiters) == [True, True]


async def test_without_pipes_a_waiter_looks_for_itself(
    driver: SQLiteDriver, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("no pipes here")

    monkeypatch.setattr(os, "mkfifo", refuse)

    async with driver:
        process = await _producer(path, "q")
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        waiter = asyncio.ensure_future(waits_of(driver)(["q"], now=NOW, timeout=30))
        await process.communicate(b"go\n")
        assert await waiter is True
    assert _pipes(path) == []


async def test_what_is_due_but_cannot_run_does_not_spin(driver: SQLiteDriver) -> None:
    """A paused queue's due job wakes its waiter once, not for ever."""

    async with driver:
        await driver.enqueue([make_record(run_at_us=NOW + SECOND)], now=NOW)
        await driver.configure("q", QueueSettings(paused=True), now=NOW)
        later = NOW + 2 * SECOND
        assert await waits_of(driver)(["q"], now=later, timeout=30) is True
        assert await driver.reserve("q", limit=1, lease_for=1, now=later, worker="w") == []
        assert await waits_of(driver)(["q"], now=later, timeout=0.05) is False


async def test_a_scheduled_job_wakes_its_waiter_on_time(driver: SQLiteDriver) -> None:
    async with driver:
        await driver.enqueue([make_record(run_at_us=NOW + SECOND // 10)], now=NOW)
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        start = time.monotonic()
        assert await waits_of(driver)(["q"], now=NOW, timeout=30) is True
        assert 0.09 < time.monotonic() - start < 10


async def test_only_an_earlier_job_notifies(driver: SQLiteDriver) -> None:
    async with driver:
        await driver.enqueue([make_record(run_at_us=NOW + 100 * SECOND)], now=NOW)
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        await driver.enqueue([make_record(run_at_us=NOW + 200 * SECOND)], now=NOW)
        assert await waits_of(driver)(["q"], now=NOW, timeout=0) is False
        await driver.enqueue([make_record(run_at_us=NOW + 50 * SECOND)], now=NOW)
        assert await waits_of(driver)(["q"], now=NOW, timeout=0) is True


def test_closing_takes_the_pipe_away(driver: SQLiteDriver, path: Path) -> None:
    async def use() -> None:
        async with driver:
            await waits_of(driver)(["q"], now=NOW, timeout=0)
            assert len(_pipes(path)) == 1

    asyncio.run(use())
    assert not Path(f"{path}-notifications").exists()


async def test_leftovers_of_dead_processes_are_removed(driver: SQLiteDriver, path: Path) -> None:
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
        assert [name for name in _pipes(path) if "unfinished" in name] == []
