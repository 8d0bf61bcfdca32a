"""Forks children that work on a database, and kills them at random moments. Run by test_sqlite_crash.

One process with one thread that has everything imported: a child costs a fork, not a start of Python. A child
reports each id after the driver answered for it; the report goes to stdout here.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import sys
import time

from taskharbor.drivers.contract import Ack, RetryAt
from taskharbor.drivers.sqlite import SQLiteDriver
from taskharbor.jobs import SECOND, Failure, JobRecord
from taskharbor.requests import new_ids

START = 1_700_000_000 * SECOND


async def produce(driver: SQLiteDriver, now: int, say: int) -> None:
    while True:
        records = [
            JobRecord(id=job_id, type="t", queue="q", run_at_us=now, created_at_us=now, max_attempts=10_000)
            for job_id in new_ids(3)
        ]
        await driver.enqueue(records, now=now)
        os.write(say, "".join(f"accepted {record.id}\n" for record in records).encode())


async def consume(driver: SQLiteDriver, now: int, say: int) -> None:
    while True:
        jobs = await driver.reserve("q", limit=5, lease_for=3 * SECOND, now=now, worker=str(os.getpid()))
        acks = [Ack(job.id, job.token or "") for job in jobs[1:]]
        again = [RetryAt(job.id, job.token or "", now, 1, Failure("E", "again")) for job in jobs[:1]]
        errors = await driver.settle([*again, *acks], now=now)
        assert errors == [None] * len(jobs), errors
        os.write(say, "".join(f"done {ack.job_id}\n" for ack in acks).encode())


async def live(url: str, now: int, say: int) -> None:
    async with SQLiteDriver.from_url(url) as driver:
        os.write(say, b"ready\n")
        await asyncio.gather(produce(driver, now, say), produce(driver, now, say), consume(driver, now, say))


def report_until_killed(pid: int, listen: int, lifetime: float, since: bytes) -> bytes:
    """Collect the child's reports; its time begins to run when it has said that word."""
    said = b""
    deadline: float | None = None
    while True:
        left = 20.0 if deadline is None else deadline - time.monotonic()
        readable = left > 0 and select.select([listen], [], [], left)[0]
        if not readable:
            break
        chunk = os.read(listen, 65536)
        if not chunk:
            break
        said += chunk
        if deadline is None and since in said:
            deadline = time.monotonic() + lifetime
    os.kill(pid, signal.SIGKILL)
    while chunk := os.read(listen, 65536):
        said += chunk
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise SystemExit(f"child ended by itself: {status}")
    return said


def main(url: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(kills):
        listen, say = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(listen)
            try:
                asyncio.run(live(url, START + number * SECOND, say))
            finally:
                os._exit(1)
        os.close(say)
        # Some may die before they have done anything; others have done something however slow the machine is.
        since = b"done" if number % 2 else b"ready"
        said = report_until_killed(pid, listen, rng.uniform(0.005, 0.06), since)
        os.close(listen)
        # A kill may cut the last line short: that one was not reported.
        sys.stdout.write(
            "".join(line.decode() for line in said.splitlines(keepends=True) if line.endswith(b"\n"))
        )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
