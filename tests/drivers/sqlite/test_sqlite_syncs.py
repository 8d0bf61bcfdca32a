"""What reaches the disk, counted at the kernel: a killed process cannot show a missing sync, its page cache survives."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def _syncs(path: Path, how: str, options: str = "") -> int:
    assert _STRACE is not None
    command = [_STRACE, "-f", "-c", "-e", "trace=fsync,fdatasync", sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
        [*command, f"sqlite:///{path}{options}", how], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr[-200:]}")
    return sum(int(calls) for calls in re.findall(r"(\d+) +(?:fsync|fdatasync)$", done.stderr, re.MULTILINE))


@pytest.mark.skipif(_STRACE is None, reason="needs strace")
def test_every_answer_has_its_sync_and_a_group_shares_one(tmp_path: Path) -> None:
    assert _syncs(tmp_path / "one.db", "one by one") >= 100
    assert _syncs(tmp_path / "all.db", "together") < 30
    assert _syncs(tmp_path / "normal.db", "one by one", "?durability=normal") < 30
