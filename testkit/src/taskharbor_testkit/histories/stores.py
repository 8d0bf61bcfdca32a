"""A history in a store: jobs go through the driver contract at instants of the past, as if workers had run them then.

The contract takes the time as an argument, so days pass in seconds. Batches share an instant. The history ends now, and leaves
some jobs that wait.
"""

from __future__ import annotations

import random
from collections import deque

from taskharbor.drivers.contract import Ack, Fail, Release, RetryAt, Settlement
from taskharbor.drivers.registry import connect
from taskharbor.jobs import SECOND, Failure, JobRecord, JobRequest, Micros
from taskharbor.requests import EncodedPayload, RecordBuilder
from taskharbor_testkit.histories.plan import DAY, DEFAULT_QUEUES, QueuePlan
from taskharbor_testkit.histories.slot import make_error

LEASES = 250
"""Leases that one call gives, settles or lets expire."""


async def fill_store(url: str, *, rows: int, days: int, seed: int = 0) -> int:
    """Make at least so many rows of the log; how many there are."""
    return await _Past(random.Random(f"{seed}/store"), rows, days).replay(url)


class _Past:
    def __init__(self, chance: random.Random, rows: int, days: int) -> None:
        self.chance, self.rows, self.span = chance, rows, days * DAY
        self.done = 0
        self.dead: deque[str] = deque()
        self._build = RecordBuilder().build

    async def replay(self, url: str) -> int:
        async with connect(url) as driver:
            rounds = max(1, -(-self.rows // LEASES))
            pause = self.span // (rounds + 1)
            # A long history in few days is quicker: all steps of a round fit into its pause.
            unit = max(1, min(SECOND, pause // 250))
            now = await driver.time() - self.span
            queues, shares = DEFAULT_QUEUES, [queue.share for queue in DEFAULT_QUEUES]
            while self.done < self.rows:
                (queue,) = self.chance.choices(queues, shares)
                # Half of it comes late, so that jobs wait.
                await driver.enqueue(self._arrivals(queue, now, pause // 2), now=now + pause // 2)
                at = now + pause // 2 + unit
                leased = await driver.reserve(
                    queue.name,
                    limit=LEASES,
                    lease_for=60 * unit,
                    now=at,
                    worker=f"{queue.name}-{self.chance.randrange(4)}",
                )
                for jobs in (leased[0::3], leased[1::3], leased[2::3]):
                    at += self.chance.randrange(unit, 10 * unit + 1)
                    ends = [end for job in jobs if (end := self._end(queue, job, at)) is not None]
                    self.done += (await driver.settle(ends, now=at)).count(None)
                at += 90 * unit
                self.done += await driver.reclaim(now=at)
                if len(self.dead) > LEASES // 10:
                    again = [self.dead.popleft() for _ in range(len(self.dead) // 3)]
                    self.done += len(await driver.requeue(again, now=at))
                now += pause
            return self.done

    def _arrivals(self, queue: QueuePlan, now: Micros, within: Micros) -> list[JobRecord]:
        chance, made = self.chance, []
        for at in sorted(now + chance.randrange(max(1, within)) for _ in range(LEASES)):
            request = JobRequest(
                type=queue.types[int(len(queue.types) * chance.random() ** 2)],
                queue=queue.name,
                priority=chance.choice(queue.priorities),
                max_attempts=queue.max_attempts,
                payload=EncodedPayload(b'{"n":1}'),
            )
            made += self._build([request], at)
        return made

    def _end(self, queue: QueuePlan, job: JobRecord, at: Micros) -> Settlement | None:
        """None: the worker died, and the lease expires."""
        dice, lease = self.chance.random(), (job.id, job.token or "")
        if dice < queue.stalling:
            return None
        if dice < queue.stalling + queue.failing:
            failure, failures = Failure(*make_error(self.chance, job.type)), job.attempts + 1
            if job.spent + 1 < queue.max_attempts:
                return RetryAt(*lease, at + 5 * SECOND * 2**failures, failures, failure)
            self.dead.append(job.id)
            return Fail(*lease, failures, failure)
        return Release(*lease, None) if dice > 0.997 else Ack(*lease)
