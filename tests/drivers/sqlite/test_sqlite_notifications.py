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


def _pipes(path: Path) -> list[str]:
    folder = Path(f"{path}-notifications")
    return sorted(os.listdir(folder)) if folder.exists() else []


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
