"""How far a lake is behind its store, while jobs run at a steady rate on the same machine.

`taskharbor pipeline run --every 10s` is a process of its own, as a user starts it. Another one enqueues, leases and settles
1,000 jobs a second in an SQLite store. The lake is behind by the time since the newest attempt of its last finished run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.measure import Figure, Series
from taskharbor.drivers.contract import Ack
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, JobRequest
from taskharbor.requests import RecordBuilder

RATE = 1_000
_BATCH = 100


async def _load(url: str, seconds: float) -> None:
    builder, began, done = RecordBuilder(), time.monotonic(), 0
    async with connect(url) as driver:
        while (passed := time.monotonic() - began) < seconds:
            if done > RATE * passed:
                await asyncio.sleep(done / RATE - passed)
                continue
            now = await driver.time()
            requests = [JobRequest(type=f"type-{n % 5}", queue=f"queue-{n % 3}") for n in range(_BATCH)]
            await driver.enqueue(builder.build(requests, now), now=now)
            for number in range(3):
                queue = f"queue-{number}"
                leased = await driver.reserve(
                    queue, limit=_BATCH, lease_for=60 * SECOND, now=await driver.time(), worker="w"
                )
                ends = [Ack(job.id, job.token or "") for job in leased]
                await driver.settle(ends, now=await driver.time())
            done += _BATCH


def behind(warm_up: float, seconds: float, goal: float = 30.0) -> Figure:
    """The 95th percentile over the time after the warm-up."""
    from taskharbor.lake.query import sql
    from taskharbor.spark.lake import Lake

    folder = Path(tempfile.mkdtemp(prefix="taskharbor-continuous-"))
    try:
        url, place = f"sqlite:///{folder}/jobs.db", str(folder / "lake")
        here = [sys.executable, "-m", "benchmarks.continuous", url, str(warm_up + seconds)]
        load = subprocess.Popen(here)
        time.sleep(1.0)
        began = time.monotonic()
        words = ["pipeline", "run", "--url", url, "--lake", place, "--every", "10s", "--json"]
        runs = subprocess.Popen(
            [sys.executable, "-m", "taskharbor", *words], stdout=subprocess.PIPE, text=True
        )
        threading.Timer(warm_up + seconds, lambda: runs.send_signal(signal.SIGTERM)).start()
        assert runs.stdout is not None
        lines = [(time.time(), time.monotonic(), json.loads(line)) for line in runs.stdout]
        assert runs.wait() == 0
        assert load.wait() == 0
        newest = {
            row["run"]: row["at"].timestamp()
            for row in sql(
                Lake(place), "SELECT run, max(ended_at) AS at FROM bronze.attempts GROUP BY run"
            ).to_pylist()
        }
        kept = [(at, newest[one["run"]]) for at, tick, one in lines if tick - began > warm_up]
        samples = [
            at + 0.1 * n - covered
            for (at, covered), (until, _) in pairwise(kept)
            for n in range(round(10 * (until - at)))
        ]
        rows = sum(one["rows_read"] for _, tick, one in lines if tick - began > warm_up)
        took = [one["seconds"] for _, tick, one in lines if tick - began > warm_up]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Figure(
        name=f"lake behind its store at {RATE:,} attempts a second, p95, load on the same cores",
        ours=Series("pipeline run --every 10s", "s", [statistics.quantiles(samples, n=20)[-1]]),
        limit=Series("one second", "s", [1.0]),
        goal=goal,
        higher_is_better=False,
        facts={
            "runs": f"{len(took)}, of {statistics.median(took):.1f} s in the middle and {max(took):.1f} s at most",
            "attempts": f"{rows:,}",
            "median": f"{statistics.median(samples):.1f} s",
        },
    )


def figures(quick: bool) -> list[Callable[[], Figure]]:
    return [lambda: behind(40, 40) if quick else behind(60, 150)]


if __name__ == "__main__":
    asyncio.run(_load(sys.argv[1], float(sys.argv[2])))
