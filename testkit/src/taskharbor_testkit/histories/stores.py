"""A history in a store: jobs go through the driver contract at instants of the past, as if workers had run them then.

The contract takes the time as an argument, so days pass in seconds. Jobs of one batch share an instant. The history ends now, and
leaves some jobs that wait.
"""

from __future__ import annotations

import math
import random
from collections import deque

from taskharbor.drivers.contract import Ack, Driver, Fail, Release, RetryAt, Settlement
from taskharbor.drivers.registry import connect
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Failure, JobRecord, JobRequest, Micros
from taskharbor.requests import EncodedPayload, RecordBuilder
from taskharbor_testkit.histories.plan import DAY, DEFAULT_QUEUES, WEEKEND, QueuePlan
from taskharbor_testkit.histories.slot import make_error

LEASES = 500
"""Jobs of a round, in a history with many rows."""
ROUND: Micros = 600 * SECOND
"""The time between two rounds, in a history with few."""
_DEAD = 25
"""Dead jobs from which on an operator requeues some."""


async def fill_store(url: str, *, rows: int, days: int, seed: int = 0) -> int:
    """Make at least so many rows of the log, in a store without jobs; how many there are."""
    return await _Past(random.Random(f"{seed}/store"), rows, days).replay(url)


class _Past:
    def __init__(self, chance: random.Random, rows: int, days: int) -> None:
        self.chance, self.rows, self.span = chance, rows, days * DAY
        self.done = 0
        self.dead: deque[str] = deque()
        self._build = RecordBuilder().build

    async def replay(self, url: str) -> int:
        async with connect(url) as driver:
            end = await driver.time()
            if any(sum(one.counts.values()) for one in await driver.stats(now=end)):
                raise InvalidRequest(
                    "the store has jobs already: name a new one, as a history fills all of its time"
                )
            rounds = max(self.span // ROUND, -(-self.rows // LEASES))
            pause = self.span // (rounds + 1)
            for number in range(rounds):
                # The rows that are missing go to the rounds that are left, more of them by day than by night.
                expected = (
                    (self.rows - self.done) / (rounds - number) * _load(end - self.span + number * pause)
                )
                await self._live(driver, end - self.span + number * pause, pause, expected)
            while self.done < self.rows:
                await self._live(driver, end - pause, pause, self.rows - self.done)
            for queue in DEFAULT_QUEUES:
                await driver.enqueue(self._arrivals(queue, end, min(pause, SECOND), 2), now=end)
            return self.done

    async def _live(self, driver: Driver, now: Micros, pause: Micros, expected: float) -> None:
        """Let jobs arrive in every queue, and workers run what is due, within less than the pause."""
        chance, step = self.chance, min(pause // 4, 45 * SECOND)
        for queue in DEFAULT_QUEUES:
            count = int(expected * queue.share + chance.random())
            for at, arriving in ((now + step, count - count // 2), (now + 2 * step, count // 2)):
                # They arrive in the seconds before workers look.
                if arriving:
                    await driver.enqueue(self._arrivals(queue, at, min(step, SECOND), arriving), now=at)
                # Over when the round ends: a claim would end it otherwise, and its row would not be counted.
                lease = 2 * step
                worker = f"{queue.name}-{chance.randrange(4)}"
                leased = await driver.reserve(
                    queue.name, limit=2 * LEASES, lease_for=lease, now=at, worker=worker
                )
                ended = at
                for jobs in (leased[0::3], leased[1::3], leased[2::3]):
                    took = chance.lognormvariate(math.log(queue.run), queue.spread) * SECOND
                    ended += 1 + int(min(took, step / 4))
                    if ends := [end for job in jobs if (end := self._end(queue, job, ended)) is not None]:
                        self.done += (await driver.settle(ends, now=ended)).count(None)
        self.done += await driver.reclaim(now=now + 4 * step)
        if len(self.dead) > _DEAD:
            again = [self.dead.popleft() for _ in range(_DEAD // 3)]
            self.done += len(await driver.requeue(again, now=now + 4 * step))

    def _arrivals(self, queue: QueuePlan, until: Micros, within: Micros, count: int) -> list[JobRecord]:
        chance, made = self.chance, []
        for at in sorted(until - chance.randrange(max(1, within)) for _ in range(count)):
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
        # A job that has failed is more likely to fail again.
        if dice < queue.stalling + (0.5 if job.attempts else queue.failing):
            failure, failures = Failure(*make_error(self.chance, job.type)), job.attempts + 1
            if job.spent + 1 < queue.max_attempts:
                return RetryAt(*lease, at + 5 * SECOND * 2**failures, failures, failure)
            self.dead.append(job.id)
            return Fail(*lease, failures, failure)
        return Release(*lease, None) if dice > 0.997 else Ack(*lease)


def _load(at: Micros) -> float:
    """The share of the mean load at an instant: little by night, and at weekends."""
    hour, weekday = at // (3600 * SECOND) % 24, (at // DAY + 3) % 7
    return (1 + 0.8 * math.cos((hour - 14) / 12 * math.pi)) * (WEEKEND if weekday >= 5 else 1.0)
