"""Waking a process that waits, from another process, without polling."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from records import NOW, make_record
from taskharbor.drivers.sqlite import SQLiteDriver, notifications
from taskharbor.drivers.waiting import Notifications
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


async def test_another_process_wakes_a_waiter_of_its_queue(
    opened: SQLiteDriver, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The safety net would wake it too, only later.
    monkeypatch.setattr(notifications, "POLL_WITH_PIPE", 60.0)
    process = await _producer(path, "q")
    waits = waits_of(opened)
    for queue in ("q", "elsewhere"):
        await waits([queue], now=NOW, timeout=0)
    waiter = asyncio.ensure_future(waits(["q"], now=NOW, timeout=30))
    # The first look is done and the pipe open once this second read is answered.
    await asyncio.sleep(0)
    await opened.stats(now=NOW)
    assert len(_pipes(path)) == 1
    await process.communicate(b"go\n")
    assert await waiter is True
    assert await waits(["elsewhere"], now=NOW, timeout=0) is False
    assert process.returncode == 0


async def test_without_pipes_a_waiter_looks_for_itself(
    opened: SQLiteDriver, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_closing_takes_the_pipe_away(driver: SQLiteDriver, path: Path) -> None:
    async with driver:
        await waits_of(driver)(["q"], now=NOW, timeout=0)
        assert len(_pipes(path)) == 1
    assert not Path(f"{path}-notifications").exists()


async def test_leftovers_of_dead_processes_are_removed(opened: SQLiteDriver, path: Path) -> None:
    folder = Path(f"{path}-notifications")
    folder.mkdir()
    # No reader: its owner must be dead.
    os.mkfifo(folder / "1-abandoned")
    notifications.notify_processes(f"{os.path.realpath(path)}-notifications")
    assert _pipes(path) == []
    # A pid that cannot exist: removed when the next pipe is opened.
    os.mkfifo(folder / ".99999999-unfinished")

    await waits_of(opened)(["q"], now=NOW, timeout=0)
    assert [name for name in _pipes(path) if "unfinished" in name] == []
