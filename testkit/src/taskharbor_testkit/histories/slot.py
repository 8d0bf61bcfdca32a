"""One slot of a queue through one day: jobs arrive, wait, run, fail, stall, are tried again, and all come to an end.

A small simulation with a clock of its own. Everything it writes lies within its day, and no two rows end at the same instant, so
that days and slots put together are a clean history whatever the others did.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import pyarrow as pa

from taskharbor.bulk.tables import ATTEMPTS
from taskharbor.drivers.contract import EXPIRED_ERROR
from taskharbor.jobs import SECOND, Micros
from taskharbor_testkit.histories.plan import DAY, START, Slot

HALF_HOUR: Micros = 1800 * SECOND
LAST_ARRIVAL: Micros = DAY - HALF_HOUR
HURRY: Micros = DAY - HALF_HOUR // 2
"""From here on everything is brought to its end before the day is over."""
BREATH: Micros = 2000
"""Between two leases of a slot there is at least this much."""
LONGEST: Micros = 600 * SECOND
ROWS_PER_JOB = 1.15
BUSY = 0.4
"""The share of a day in which a slot runs jobs, at most and on average; twice that at the peak."""
KEYS = 40

_DUE, _REQUEUE, _CANCEL = range(3)


@dataclass(slots=True)
class Row:
    """The columns of `ATTEMPTS`, by the same names; instants in microseconds."""

    seq: int
    job_id: str
    queue: str
    type: str
    key: str | None
    priority: int
    fence: int
    worker: str | None
    created_at: Micros
    run_at: Micros
    reserved_at: Micros | None
    lease_expires_at: Micros | None
    ended_at: Micros
    outcome: str
    state: str
    error_type: str | None
    error_message: str | None
    payload_size: int

    @property
    def until(self) -> Micros:
        """Up to when the lease was valid."""
        assert self.lease_expires_at is not None
        return min(self.ended_at, self.lease_expires_at)


_columns_of = attrgetter(*ATTEMPTS.names)


def to_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = zip(*map(_columns_of, rows), strict=True) if rows else [()] * len(ATTEMPTS)
    arrays = [pa.array(column, type=field.type) for field, column in zip(ATTEMPTS, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ATTEMPTS)


@dataclass(slots=True)
class Job:
    id: str
    type: str
    key: str | None
    priority: int
    created_at: Micros
    run_at: Micros
    payload_size: int
    is_poisoned: bool
    fence: int = 0
    attempts: int = 0
    stalls: int = 0


class SlotDay:
    """`rows()` gives exactly as many rows as asked for."""

    def __init__(self, slot: Slot, slots: int, day: int, quota: int, seed: int) -> None:
        self._slot = slot
        self._queue = slot.queue
        self._slots = slots
        self._day = day
        self._chance = random.Random(f"{seed}/{day}/{slot.index}")
        self._quota = quota
        self._start = START + day * DAY
        self._now = self._start
        self._hurry = self._start + HURRY
        self._rows: list[Row] = []
        self._owed = 0
        """Rows that the jobs which are there will need at least."""
        self._numbers = 0
        self._restarts = 0
        self._ready: list[tuple[int, Micros, int, Job]] = []
        self._later: list[tuple[Micros, int, int, Job]] = []
        self._keys: set[str] = set()
        self._run_us = min(self._queue.run * SECOND, BUSY * DAY / max(1, quota))
        self._run_mu = math.log(self._run_us) - self._queue.spread**2 / 2

    def rows(self) -> list[Row]:
        arrivals = self._arrivals()
        while len(self._rows) < self._quota:
            while arrivals and arrivals[-1] <= self._now:
                self._arrive(arrivals.pop())
            while self._later and (self._later[0][0] <= self._now or self._is_hurrying()):
                self._come_due()
            if self._ready:
                self._execute(heapq.heappop(self._ready)[-1])
            elif len(self._rows) < self._quota:
                self._wait(arrivals)
        return self._rows

    # -- time -----------------------------------------------------------------------------------------------

    def _wait(self, arrivals: list[Micros]) -> None:
        """Until the next thing happens; where nothing would, somebody sends another job."""
        upcoming = arrivals[-1:] + [one[0] for one in self._later[:1]]
        if upcoming:
            self._now = max(self._now, min(*upcoming, self._hurry))
        else:
            self._pass(self._chance.randrange(BREATH, SECOND))
            self._arrive(self._now)

    def _is_hurrying(self) -> bool:
        return self._now >= self._hurry

    def _left(self) -> Micros:
        """Return the longest time for the next step that leaves room in the day for all later ones."""
        return (self._start + DAY - self._now) // (2 * (self._quota - len(self._rows)) + 2)

    def _pass(self, micros: float) -> None:
        self._now += max(1, int(min(micros, self._left()) if self._is_hurrying() else micros))

    def _arrivals(self) -> list[Micros]:
        """When jobs come in, the last one first: by the queue's daily curve."""
        halves = range(LAST_ARRIVAL // HALF_HOUR)
        peak = self._queue.peak_hour
        curve = [1.05 + math.cos((half / 2 - peak) / 12 * math.pi) for half in halves]
        drawn = self._chance.choices(halves, curve, k=int(self._quota / ROWS_PER_JOB))
        instants = [self._start + half * HALF_HOUR + self._chance.randrange(HALF_HOUR) for half in drawn]
        return sorted(instants, reverse=True)

    # -- jobs -----------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Return the number of rows that may still be promised."""
        return self._quota - len(self._rows) - self._owed

    def _arrive(self, at: Micros) -> None:
        if self._room() < 1:
            return
        chance, queue = self._chance, self._queue
        job = Job(
            id=self._new_id(at),
            type=queue.types[int(len(queue.types) * chance.random() ** 2)],
            key=self._free_key() if chance.random() < queue.keyed else None,
            priority=queue.priorities[int(len(queue.priorities) * chance.random())],
            created_at=at,
            run_at=at,
            payload_size=int(60 * 50 ** chance.random()),
            is_poisoned=chance.random() < queue.poisoned,
        )
        self._owed += 1
        if job.key is not None:
            self._keys.add(job.key)
        if chance.random() < queue.delayed:
            job.run_at = at + chance.randrange(60 * SECOND, 7200 * SECOND)
            if chance.random() < 0.03:
                self._put(at + chance.randrange(60 * SECOND), _CANCEL, job)
                return
        self._put(job.run_at, _DUE, job)

    def _new_id(self, at: Micros) -> str:
        """Like those of the client: time first, then what tells this history's jobs from each other."""
        self._numbers += 1
        head = f"{at // 1000:012x}"
        tail = self._chance.getrandbits(24)
        return f"{head[:8]}-{head[8:]}-7{self._slot.index & 0xFFF:03x}-8{self._day & 0xFFF:03x}-{self._numbers:06x}{tail:06x}"

    def _free_key(self) -> str | None:
        """Keys belong to a slot, and one job at a time waits or runs for each: others would have joined it."""
        key = f"{self._queue.name}-{self._slot.number * KEYS + int(KEYS * self._chance.random())}"
        return None if key in self._keys else key

    def _put(self, at: Micros, what: int, job: Job) -> None:
        self._numbers += 1
        heapq.heappush(self._later, (at, self._numbers, what, job))

    def _come_due(self) -> None:
        _, number, what, job = heapq.heappop(self._later)
        if what == _DUE:
            # Nothing may be left for tomorrow: what would be due then is made due.
            job.run_at = min(job.run_at, self._now)
            heapq.heappush(self._ready, (-job.priority, job.run_at, number, job))
            return
        self._pass(BREATH)
        if what == _CANCEL:
            self._write(job, "cancelled", "cancelled")
            self._end(job)
        else:
            self._write(job, "requeued", "ready")
            self._owed -= 1
            job.run_at, job.attempts, job.stalls, job.is_poisoned = self._now, 0, 0, False
            self._put(job.run_at, _DUE, job)

    # -- leases -----------------------------------------------------------------------------------------------

    def _execute(self, job: Job) -> None:
        chance, queue = self._chance, self._queue
        self._pass(BREATH + chance.expovariate(1 / (20 * BREATH)))
        reserved = self._now
        job.fence += 1
        dice = chance.random()
        is_free = self._room() > 2 and not self._is_hurrying()
        if is_free and dice < queue.stalling:
            self._stall(job, reserved)
            return
        self._pass(min(LONGEST, chance.lognormvariate(self._run_mu, queue.spread)))
        if is_free and (job.is_poisoned or dice < queue.stalling + queue.failing):
            self._fail(job, reserved)
        elif is_free and dice > 0.996:
            is_snoozed = dice > 0.999
            due = self._now + 60 * SECOND if is_snoozed else job.run_at
            self._write(job, "released", "scheduled" if is_snoozed else "ready", reserved)
            self._wait_again(job, due)
        else:
            end = "cancelled" if is_free and dice > 0.994 else "done"
            self._write(job, end, end, reserved)
            self._end(job)

    def _stall(self, job: Job, reserved: Micros) -> None:
        """The worker dies or hangs after a few heartbeats; somebody sweeps up after the lease has run out."""
        lease = int(self._queue.lease * SECOND)
        expires = reserved + lease + self._chance.randrange(3) * lease // 3
        self._now = expires + self._chance.randrange(BREATH, SECOND)
        job.stalls += 1
        is_dead = job.attempts + job.stalls >= self._queue.max_attempts
        error = (EXPIRED_ERROR.type, EXPIRED_ERROR.message)
        self._write(job, "expired", "dead" if is_dead else "ready", reserved, error, expires)
        self._restarts += 1
        if is_dead:
            self._die(job)
        else:
            self._wait_again(job, job.run_at)

    def _fail(self, job: Job, reserved: Micros) -> None:
        chance = self._chance
        error = make_error(chance, job.type)
        job.attempts += 1
        if job.attempts + job.stalls < self._queue.max_attempts:
            self._write(job, "retried", "scheduled", reserved, error)
            self._merge_another_into(job)
            self._wait_again(job, self._now + int(5 * SECOND * 2**job.attempts * chance.uniform(0.8, 1.2)))
            return
        self._write(job, "dead", "dead", reserved, error)
        self._die(job)

    def _die(self, job: Job) -> None:
        chance = self._chance
        if chance.random() < 0.3 and self._room() > 2:
            self._owed += 1
            self._put(self._now + chance.randrange(600 * SECOND, 7200 * SECOND), _REQUEUE, job)
        else:
            self._end(job)

    def _merge_another_into(self, job: Job) -> None:
        """Somebody asked for the same key while it ran; now that it goes back to waiting, the two become one."""
        if job.key is None or self._room() < 2 or self._chance.random() > 0.3:
            return
        created = self._now - 1
        other = Job(self._new_id(created), job.type, job.key, 0, created, created, job.payload_size, False)
        self._now += 1
        self._write(other, "merged", "cancelled")

    def _wait_again(self, job: Job, due: Micros) -> None:
        job.run_at = due
        self._put(due, _DUE, job)

    def _end(self, job: Job) -> None:
        self._owed -= 1
        if job.key is not None:
            self._keys.discard(job.key)

    def _write(
        self,
        job: Job,
        outcome: str,
        state: str,
        reserved: Micros | None = None,
        error: tuple[str, str] | None = None,
        expires: Micros | None = None,
    ) -> None:
        """A row that ends now. The lease was kept by heartbeats every third of its length, unless told otherwise."""
        if reserved is not None and expires is None:
            lease = int(self._queue.lease * SECOND)
            beat = lease // 3
            expires = reserved + lease + (self._now - reserved) // beat * beat
        self._rows.append(
            Row(
                number_of_row(self._now, self._slot, self._slots),
                job.id,
                self._queue.name,
                job.type,
                job.key,
                job.priority,
                job.fence,
                None if reserved is None else self._worker(),
                job.created_at,
                job.run_at,
                reserved,
                expires,
                self._now,
                outcome,
                state,
                error and error[0],
                error and error[1],
                job.payload_size,
            )
        )

    def _worker(self) -> str:
        """Four slots to a process; all are new every day, and a process that stalled is replaced."""
        return f"{self._queue.name}-{self._slot.number // 4 + 1}.{self._day + 1}.{self._restarts}"


def number_of_row(ended_at: Micros, slot: Slot, slots: int) -> int:
    """Rows are numbered in the order in which they ended, over all slots, without asking each other."""
    return (ended_at - START) * slots + slot.index + 1


def make_error(chance: random.Random, type: str) -> tuple[str, str]:
    """Type and message of an error, with the ids, numbers and addresses that real messages carry."""
    number = chance.randrange(10_000, 10_000_000)
    match chance.choices(range(5), (40, 25, 20, 10, 5))[0]:
        case 0:
            host = f"api-{chance.randrange(4)}.example.com"
            seconds = chance.choice((5, 10, 30))
            return "TimeoutError", f"https://{host}/v1/{type}/{number}: no answer within {seconds} s"
        case 1:
            address = f"10.0.{chance.randrange(4)}.{chance.randrange(2, 250)}:5432"
            return "ConnectionRefusedError", f"connection to {address} refused"
        case 2:
            seconds = chance.randrange(1, 60)
            return "ServiceUnavailable", f"503 for request {number:08x}, retry after {seconds} s"
        case 3:
            return "KeyError", "'customer_id'"
        case _:
            return "ValueError", f"order {number}: amount {chance.random() * 1000:.2f} is not allowed"
