"""Two brokers' processes on one store: the leader is stopped past its term and resumed."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drivers.objectstore.marks import Marks, all_marks
from taskharbor.drivers.objectstore.cas import CasObject
from taskharbor.drivers.objectstore.catalog import state_name
from taskharbor.drivers.objectstore.options import parse_url
from taskharbor_testkit.servers.s3 import fresh_s3_url

PROGRAM = "drivers.objectstore.leading_crew"
TESTS = Path(__file__).parents[2]
TERM = 2.0


class Broker:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def until(self, words: str) -> None:
        """Listen until it says so."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            while not (self.said and self.said[-1].startswith(words)):
                line = (await self.process.stdout.readline()).decode().strip()
                assert line, f"it ended; it had said {self.said[-5:]}"
                self.said.append(line)

    @property
    def answered(self) -> list[str]:
        return [line.removeprefix("answered ") for line in self.said if line.startswith("answered ")]


@asynccontextmanager
async def broker(url: str, name: str, *, stop_after: int = 0) -> AsyncIterator[Broker]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", PROGRAM, url, name, str(TERM), str(stop_after)), cwd=TESTS, stdout=PIPE
    )
    try:
        yield Broker(process)
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.parametrize("kind", ["file", "s3"])
async def test_a_leader_stopped_past_its_term_is_refused_when_it_wakes_and_steps_down(
    kind: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/store" if kind == "file" else fresh_s3_url()

    async with broker(url, "old", stop_after=10) as old:
        await old.until("leads 1")
        await old.until("stops")
        async with broker(url, "new") as new:
            await new.until("leads 2")
            await new.until("answered new.9")
            old.process.send_signal(signal.SIGCONT)
            await old.until("refused old.10")
            await old.until("lost")
            await new.until("answered new.15")
            assert "unclear" not in " ".join(old.said + new.said)
    blobs = parse_url(url).open()
    landed = await CasObject(blobs, state_name("mail", 0), Marks).look(all_marks)
    await blobs.close()
    assert len(landed) == len(set(landed))
    assert set(old.answered) | set(new.answered) <= set(landed)
    assert [mark for mark in landed if mark.startswith("old")] == old.answered
