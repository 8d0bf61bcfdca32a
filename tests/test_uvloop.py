"""Clients and workers on the event loop that many web servers bring along."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from taskharbor import Harbor, JobState
from taskharbor.client import AsyncClient

uvloop = pytest.importorskip("uvloop")

COUNT = 30


@pytest.fixture(params=["sqlite", "postgres", "redis", "files"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/jobs.db"
        case "files":
            return f"file://{tmp_path}/store?sync=off"
        case server:
            return str(request.getfixturevalue(f"{server}_url"))


def test_jobs_are_stored_worked_off_and_looked_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Also for the worker's own thread.
    monkeypatch.setattr(asyncio.events, "new_event_loop", uvloop.new_event_loop)
    harbor = Harbor(url)
    loops: set[str] = set()

    @harbor.job
    async def double(n: int) -> int:
        loops.add(type(asyncio.get_running_loop()).__module__)
        return 2 * n

    async def main() -> None:
        async with AsyncClient(url) as client:
            first = await client.enqueue(double.request(0))
            working = asyncio.create_task(harbor.worker(max_jobs=COUNT).run_async())
            rest = await client.enqueue_batch([double.request(n) for n in range(1, COUNT)])
            await working
            found = [await client.get(job_id) for job_id in (first.id, *(one.id for one in rest))]
            assert {record.state for record in found} == {JobState.DONE}

    uvloop.run(main())
    assert loops == {"uvloop"}
