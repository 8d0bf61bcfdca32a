"""The audit: exact rows in, exact violation out; no false alarm on what drivers write; and made-up histories, whose planted
violations it finds.

All cases are audited together, each as a source of its own: starting Spark jobs costs more than running them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from drivers.postgres.harness import Raw
from spark.histories import LIMIT, NO_LEASE, START, Row, Told, at, frames, life_on, live, row
from spark.histories import QUEUES as LIFE_QUEUES
from spark.stores import compiling
from taskharbor.bulk.tables import JOBS
from taskharbor.cli.root import root
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.jobs import JobState, to_micros
from taskharbor.lake.delta import Lake
from taskharbor.schedules import QUEUE, Schedule
from taskharbor.schedules.specification import StoredSchedule
from taskharbor.schedules.tick_ids import tick_id
from taskharbor.spark.audit import Kind, audit, audit_store, summarise
from taskharbor.spark.audit.checks import STORE_KINDS
from taskharbor.spark.audit.stored import Stored
from taskharbor.spark.lake.frames import ATTEMPT_COLUMNS
from taskharbor_testkit.histories import generate, generate_with_store, queue_limits
from taskharbor_testkit.histories.planting import PLANTERS
from taskharbor_testkit.servers import drop_schema, given_or_shared_postgres, with_fresh_schema
from taskharbor_testkit.simulation.scenario import write_scenario
from taskharbor_testkit.simulation.world import World

pytestmark = pytest.mark.timeout(600)  # The first test waits for the audit of all.
QUEUES = "source string, queue string, paused boolean, max_inflight int, inflight long"
READ_AT, WAITING_LIMIT = 50_000, timedelta(hours=1)
"""When the store was read, in seconds after the start of the cases, and how long a job may wait."""
LIMITS = "source string, queue string, max_inflight int, observed_at timestamp"


class Case(NamedTuple):
    """A log, and what is wrong with it."""

    log: str
    finds: str = ""
    limits: Sequence[tuple[int | None, float]] = ()
    """W, seen at"""
    live: Sequence[Row] | None = None
    """Jobs in the store."""
    later: str = ""
    """Rows that came into the log before the jobs were read, or after that."""
    is_paused: bool = False

    def rows(self) -> list[Row]:
        return self._rows_of(self.log, 1)

    def later_rows(self) -> list[Row]:
        return self._rows_of(self.later, 1000)

    def _rows_of(self, log: str, first: int) -> list[Row]:
        found = []
        for seq, text in enumerate(filter(None, log.split(", ")), first):
            lease, times, *words = text.split()
            job, fence = lease.split(":")
            named = {"queue": QUEUE, "key": "s"} if job.startswith("own.") else {}
            start, _, end = times.rpartition("-")
            values: Row = {"seq": seq, "job_id": full_id(job), "fence": int(fence), "run_at": 0, **named}
            values |= {"ended_at": float(end.strip("@"))}
            values |= {"reserved_at": float(start)} if start else NO_LEASE
            for word in words:
                name, _, value = word.rpartition("=")
                values[name or "outcome"] = float(value) if name.endswith("_at") else value
            if values.get("outcome") == "retried":
                values.setdefault("state", "ready")
            found.append(row(**values | {"seq": int(values["seq"])}))
        return found

    def findings(self) -> Counter[tuple[Any, ...]]:
        """kind, job, other job, fence, other fence"""
        found = re.findall(r"(\w+) ([\w.]+):(\d+)(?:/(?:([\w.]+):)?(\d+))?", self.finds)
        return Counter(
            (kind, full_id(job), full_id(other) or None, int(fence), int(last) if last else None)
            for kind, job, fence, other, last in found
        )


def full_id(name: str) -> str:
    """`own.a` is the job of schedule `s` in generation a, and `tick.a.60` its job for 60 seconds after the start. The fraction
    may be written out, as in `tick.a.60.000`."""
    kind, _, rest = name.partition(".")
    generation, _, time = rest.partition(".")
    if kind == "own":
        return f"019b0000-0000-7000-8000-{generation * 12}"
    if kind == "tick":
        seconds, _, fraction = time.partition(".")
        made = tick_id("tick", "s", generation * 12, at(float(seconds)))
        return f"{made[:-1]}.{fraction}Z" if fraction else made
    return name


def cases(text: str) -> dict[str, Case]:
    """A case is `name: row, row => finding, finding | W limit@seen... store job:state:fence name=value... later row, row`.

    A row of the log is `job:fence start-end outcome name=value...`, or `@end` if it ended no lease. It is done unless it says
    otherwise. A finding is `kind job:fence/other`, and the other is a fence, or a job and its fence.
    """
    made = {}
    for line in text.strip().replace("\n    ", " ").splitlines():
        name, _, case = line.partition(": ")
        told, _, around = case.partition(" | ")
        log, _, finds = told.partition(" => ")
        around, _, later = around.partition(" later ")
        limits = re.findall(r"(\d+|none)@(\d+)", around)
        seen = [(None if most == "none" else int(most), float(when)) for most, when in limits]
        live = [
            {"id": full_id(job), "state": state, "fence": int(fence)}
            | dict(re.findall(r"(\w+)=(\S+)", more))
            | ({"queue": QUEUE, "key": "s"} if job.startswith("own.") else {})
            for job, state, fence, more in re.findall(r"([\w.]+):(\w+):(\d+)((?: \w+=\S+)*)", around)
        ]
        made[name] = Case(log, finds, seen, live or None, later, "paused" in around)
    return made


def stored(job: Row) -> Row:
    """A job in the store: by default with all its attempts used up, and due far in the future."""
    numbers = {"attempts": 5, "max_attempts": 5} | dict.fromkeys(("stalls", "max_stalls", "priority"), 0)
    times = {"created_at": START, "run_at": at(READ_AT + 1), "finished_at": None}
    texts = {"queue": "default", "type": "send", "codec": "json", "payload": b""}
    made: Row = dict.fromkeys(job_columns.name for job_columns in JOBS) | numbers | times | texts | job
    reads: dict[str, Callable[[str], Any]] = dict.fromkeys(("int32", "int64"), int)
    reads["timestamp[us, tz=UTC]"] = lambda value: at(float(value))
    reads["binary"] = SCHEDULES.__getitem__
    changed = {
        name: reads.get(str(JOBS.field(name).type), str)(value)
        for name, value in job.items()
        if isinstance(value, str)
    }
    return made | changed


def schedule(since: float = 0, paused: str | None = None, **fields: Any) -> bytes:
    """A schedule every minute."""
    spec = Schedule(name="s", job="work", every=60.0, queue="default", **fields)
    return msgspec.json.encode(StoredSchedule(spec=spec, since=to_micros(at(since)), paused=paused))


# Payloads of schedules' own jobs, by the name that a case gives them.
SCHEDULES = {
    "minutely": schedule(),
    "changed": schedule(since=60.000001),
    "paused": schedule(paused=""),
    "skip": schedule(overlap="skip"),
    "last": schedule(catch_up_mode="last"),
    "keyed": schedule(key="k"),
    "cautious": schedule(pause_on_failure=True),
    "ended": schedule(end=at(59)),
    "unreadable": b"{}",
    "catches_up": schedule(catch_up=600),
}

BROKEN = cases("""
two leases of a job overlap by a moment: a:1 10-20 retried, a:2 19.999999-25 => overlapping_leases a:2/1
a lease overlaps one that expired later: a:1 10-45 expired lease_expires_at=40, a:2 39-50 => overlapping_leases a:2/1
a lease without extent lies within another: a:1 10-20 retried, a:2 15-15 => overlapping_leases a:2/1
a later row has a lower fence: a:2 10-20 retried, a:1 30-40 => fence_out_of_order a:1/2
a row without a lease carries an older fence:
    a:1 10-11 retried, a:2 20-21 retried, a:1 @22 cancelled => fence_out_of_order a:1/2
two leases have one fence: a:1 10-20 retried, a:1 30-40 => fence_used_twice a:1/1
a lease left no row: a:1 10-20 retried, a:3 30-40 => fence_gap a:3/1
the first lease left no row, in a log that reaches back far enough: old:1 1-2, a:2 30-40 created_at=20 => fence_gap a:2/0
a job was cancelled with the fence of a lease that left no row: a:1 10-20 retried, a:2 @30 cancelled => fence_gap a:2/1
three leases where two are allowed: a:1 10-20, b:1 11-20, c:1 19.999999-25 => limit_exceeded c:1 | W 2@100
the larger of two limits was exceeded between them:
    j1:1 10.1-20, j2:1 10.2-20, j3:1 10.3-20, j4:1 10.4-20 => limit_exceeded j4:1 | W 2@5 3@60
leased before it was due: a:1 10-20 run_at=10.000001 => started_early a:1
two jobs of a key at once: a:1 10-20 key=k, b:1 19-30 key=k => key_held_twice b:1/a:1
done and then dead: a:1 10-20, a:2 30-40 dead => ended_twice a:2/1
cancelled and then leased: a:0 @5 cancelled, a:1 30-40 retried => active_after_end a:1/0
requeued though done: a:1 10-20, a:1 @30 requeued => requeued_alive a:1/1
settled at the instant the lease was over: a:1 10-40 => settled_too_late a:1
expired while it was valid: a:1 10-39.999999 expired => expired_too_early a:1
ended before it began: a:1 10-9 => times_out_of_order a:1
leased long before it was created: a:1 10-20 created_at=15.5 => times_out_of_order a:1
over before it began: a:1 10-12 expired lease_expires_at=10 => times_out_of_order a:1
done, and yet ready: a:1 10-20 state=ready => state_contradicts_outcome a:1
requeued, and dead: a:1 10-20 dead, a:1 @30 requeued state=dead => state_contradicts_outcome a:1
done without a lease: a:0 @20 => lease_contradicts_outcome a:0
merged under a lease: a:1 10-20 merged => lease_contradicts_outcome a:1
an outcome nobody knows: a:1 10-20 vanished state=done => unknown_outcome a:1
a row is there twice: a:1 10-20, a:1 10-20 seq=1 => duplicate_row a:1/1
a number belongs to two rows: a:1 10-20, b:1 10-20 seq=1 => duplicate_row a:1/b:1
a lease ended twice, under two numbers: a:1 10-20, a:1 10-20 => duplicate_row a:1/1
a copied row does not count twice in W: a:1 10-20, a:1 10-20 seq=1, b:1 12-20 => duplicate_row a:1/1 | W 2@100
the store has lost a job: a:1 10-20 retried, b:1 10-20 => lost_job a:1 | store b:done:1
the store has an older state than the log: a:1 10-20 retried, a:2 30-40 retried, b:1 10-20
    => store_contradicts_log a:2/1, store_contradicts_log b:1/1 | store a:ready:1 b:ready:1
the store has a lease that the log has ended: a:1 10-20 retried
    => store_contradicts_log a:1/1 | store a:inflight:1
a lease of more than a day: a:1 10-20 lease_expires_at=86426 => lease_too_long a:1
two workers ended one lease: a:1 10-20 retried worker=w1, a:1 10-21 retried worker=w2
    => settled_by_another a:1/1, fence_used_twice a:1/1, overlapping_leases a:1/1
a failed job was to wait, and was leased as if it had not failed:
    a:1 10-20 retried state=scheduled, a:2 30-40 run_at=14.999999 => retried_too_early a:2/1
the next lease was before this one: a:1 50-60 retried, a:2 10-20 => time_went_back a:2/1
done, and with an error: a:1 10-20 error_type=ValueError => done_with_error a:1
the type of a job changed: a:1 10-20 retried, a:2 30-40 type=other => job_changed a:2/1
the key of a job changed: a:1 10-20 retried key=k, a:2 30-40 key=l => job_changed a:2/1
a job lost its key: a:1 10-20 retried key=send, a:2 30-40 => job_changed a:2/1
the queue of a job changed: a:1 10-20 retried, a:2 30-40 queue=other => job_changed a:2/1
a job ran and was merged: a:1 10-20 retried key=k, a:1 @30 merged key=k => ran_and_merged a:1/1
dead by an expired lease with executions left:
    a:1 10-40 expired state=dead, b:1 10-40 expired state=dead => died_too_early a:1/1, died_too_early b:1/1
    | store a:dead:1 attempts=0 stalls=1 max_attempts=2 b:dead:1 attempts=0 stalls=1 max_attempts=1 max_stalls=2
more executions than allowed: a:1 10-20 retried, a:2 30-60 expired, a:3 70-80 => too_many_executions a:3/3
    | store a:done:3 max_attempts=2
more stalls than allowed: a:1 10-40 expired, a:2 50-80 expired => too_many_executions a:2/2
    | store a:ready:2 max_stalls=1
more executions than allowed, twice: a:1 10-20 retried, a:2 30-40 dead, a:2 @50 requeued, a:3 60-70 retried, a:4 80-90
    => too_many_executions a:4/4 | store a:done:4 max_attempts=1
done without a row in the log: old:1 1-2, new:1 4000-4001 => done_without_row a:1
    | store old:done:1 new:done:1 a:done:1 created_at=10 finished_at=20
done without a row, after another lease: old:1 1-2, a:1 30-40 retried created_at=10, new:1 4000-4001 => done_without_row a:1
    | store old:done:1 new:done:1 a:done:2 created_at=10 finished_at=20
waiting for hours, without any lease and after one: a:1 10-20 retried => left_waiting a:1, left_waiting b:0
    | store a:scheduled:1 run_at=30 b:ready:0 run_at=30
waiting for hours in a queue with free places: a:1 10-20 => left_waiting b:0 | W 2@0 store a:done:1 b:ready:0 run_at=30
two ids for one tick: tick.a.60:1 60-61, tick.a.60.000:1 62-63 created_at=1 => tick_doubled tick.a.60.000:1/tick.a.60:1
a tick was made again when its job was forgotten:
    tick.a.60:1 60-61, tick.a.60:1 500-501 created_at=400 => tick_doubled tick.a.60:1/1
two schedules of one name at once: own.a:1 10-11 released, own.b:1 12-13 released, own.a:2 60-61 released, own.b:2 61-62 released,
    tick.a.60:1 62-63, tick.b.60:1 62-63 created_at=1 => tick_doubled tick.b.60:1/tick.a.60:1
a tick has no job: old:1 1-2, own.a:1 60-61 released run_at=60, new:1 4000-4001 => tick_lost tick.a.60:0/own.a:1
    | store own.a:scheduled:1 run_at=120 payload=minutely
the one in the middle has no job: old:1 1-2, own.a:1 180-181 released run_at=60, tick.a.60:1 182-183, new:1 4000-4001
    => tick_lost tick.a.120:0/own.a:1 | store tick.a.180:ready:0 own.a:scheduled:1 run_at=240 payload=catches_up
""")
BROKEN["a lease that began many buckets before still counts"] = Case(
    f"a:1 10-5000 lease_expires_at=5030, {', '.join(f's{n}:1 {30 + n}-{30.5 + n}' for n in range(2, 900))}, b:1 4999-5001",
    ", ".join(f"limit_exceeded {job}:1" for job in ("b", *(f"s{n}" for n in range(2, 900)))),
    limits=[(1, 100)],
)

CLEAN = cases("""
a lease begins when the one before ends: a:1 10-20 retried, a:2 20-30 | W 1@0
leases without extent, all at one instant: a:1 10-10 released, a:2 10-10 released, a:3 10-20 | W 1@0
an expired lease frees its place before anybody sweeps: a:1 10-60 expired state=dead, b:1 40-50 | W 1@0
requeued, and the fence goes on:
    a:1 10-20 dead, a:1 @30 requeued, a:2 40-50 dead, a:2 @60 requeued state=blocked, a:2 @70 merged
requeued for later: a:1 10-20 dead, a:1 @30 requeued state=scheduled run_at=50, a:2 60-70 run_at=50
an expired job that absorbed one which is due later:
    a:1 10-40 expired state=scheduled key=k, b:0 @40 merged key=k, a:2 90-95 key=k
the first rows of a job have been removed by retention: a:4 10-20 retried seq=7, a:5 30-40 seq=9
an id is given to another job: a:1 10-20, a:1 110-120 created_at=100
a job that was due before it was stored is claimed by a clock that is behind: a:1 10-20 run_at=9 created_at=11
two jobs of a key, one after the other: a:1 10-20 key=k, b:1 20-30 key=k
one key in two queues: a:1 10-20 key=k, b:1 15-30 key=k queue=r
a lowered limit revokes no lease: j1:1 10.1-300 lease_expires_at=330, j2:1 10.2-300 lease_expires_at=330,
    j3:1 10.3-300 lease_expires_at=330 | W 3@0 3@100 1@200 1@400
between two limits the larger one counts:
    j1:1 150.1-160, j2:1 150.2-160, j3:1 150.3-160 | W 1@0 1@100 3@200
around no limit nothing is checked:
    j1:1 150.1-160, j2:1 150.2-160, j3:1 150.3-160 | W 1@0 none@200 1@400
the store is ahead of the log: a:1 10-20 retried, b:1 10-20 dead, c:1 10-20 | store a:inflight:2 b:ready:1
a heartbeat came just before the end of a lease of a day: a:1 10-20 lease_expires_at=86420
a client with a clock that is behind made a job wait that was due:
    a:1 10-20 retried state=scheduled, a:2 20-30 run_at=15
one that tried again at once: a:1 10-20 retried, a:2 20-30 run_at=0
a job with a key takes over the type and the time of another:
    a:1 10-20 retried state=scheduled key=k run_at=9, a:2 20-30 key=k type=other run_at=1
an expired job is dead when all is used up: a:1 10-40 expired, a:2 50-80 expired state=dead, b:1 10-40 expired state=dead
    | store a:dead:2 attempts=0 stalls=2 max_attempts=2 b:dead:1 attempts=0 stalls=1 max_attempts=9 max_stalls=1
a handler gives up: a:1 10-20 dead | store a:dead:1 attempts=1
a released lease spends nothing: a:1 10-20 released, a:2 20-30 released, a:3 30-40 released, a:4 40-50
    | store a:done:4 max_attempts=1
fresh counts after a requeue, or a budget for stalls: a:1 10-20 dead, a:1 @30 requeued, a:2 40-50, b:1 10-40 expired, b:2 50-60
    | store a:done:2 max_attempts=1 b:done:2 max_attempts=1 max_stalls=2
a job that is never tried is tried once: a:1 10-20 | store a:done:1 max_attempts=0
more executions by another request with the key: a:1 10-20 retried key=k, a:2 30-40 key=k | store a:done:2 key=k max_attempts=1
a job ended while the store was read: old:1 1-2, a:1 30-40 retried created_at=10
    | store old:done:1 a:done:2 created_at=10 finished_at=60 b:done:1 created_at=10 finished_at=60
    later a:2 50-60 created_at=10, b:1 50-60 created_at=10, c:1 4000-4001
a job has just ended, and its row cannot be read yet: old:1 1-2, new:1 3000-3001
    | store old:done:1 new:done:1 a:done:1 created_at=10 finished_at=20
a job ended and was removed while the store was read: a:1 10-20 retried | store b:cancelled:0 later a:2 30-40
a new job came after the store was read: a:1 10-20 | store a:done:1 later b:1 30-40 retried
the row of a job that is done was removed by retention: b:1 30-40 created_at=20, new:1 4000-4001
    | store a:done:1 finished_at=20 b:done:1 created_at=20 new:done:1
due for less than the limit: a:1 10-46401 released lease_expires_at=46500 | store a:ready:1 run_at=9 b:ready:0 run_at=46401
    c:ready:0 run_at=9 created_at=46401
waiting in a paused queue: a:1 10-20 | paused store a:done:1 b:ready:0 run_at=30
waiting in a queue that is full: a:1 10-20 | W 1@0 store a:done:1 b:ready:0 run_at=30 c:inflight:1
waiting in a queue that has just ended a lease: a:1 10-20 | W 1@0 store a:done:1 b:ready:0 run_at=30
    later d:1 49990-49995 run_at=49980
waiting behind a job of its key: a:1 10-20 key=k | store a:done:1 b:ready:0 run_at=30 key=k
claimed since then: a:1 10-20 retried | store a:ready:2 run_at=30 b:ready:1 run_at=30 later a:2 50-60 retried, a:3 70-80
blocked for hours: a:1 10-20 | store a:done:1 b:blocked:0 run_at=30
a schedule goes on for ever:
    a:1 10-20 released key=k run_at=10 state=scheduled, a:2 30-31 released key=k run_at=30 state=scheduled, a:3 40-41 released
    key=k run_at=40 state=scheduled | store a:scheduled:3 key=k run_at=50 max_attempts=1
a schedule's own job fails and waits as often as it likes: own.a:1 10-20 retried state=scheduled run_at=10 error_type=Skipped,
    own.a:2 30-40 retried state=scheduled run_at=10, own.a:3 50-80 expired run_at=10, own.a:4 90-91 released run_at=10
    | store own.a:ready:4 run_at=90 max_attempts=1 payload=skip
a tick was asked for again beside its job: backfill.a:1 60-61, tick.a.60:1 62-63, trigger.a:1 64-65
a tick was requeued: tick.a.60:1 60-61 dead, tick.a.60:1 @70 requeued, tick.a.60:2 80-81
a schedule was put again at the instant of a tick: own.a:1 60-61 released, tick.a.60:1 60-61, own.a:1 @62 cancelled,
    own.b:1 62-63 released created_at=60, tick.b.60:1 63-64 created_at=62
ticks have jobs in the log, in the store and in rows to come: old:1 1-2, own.a:1 60-61 released run_at=60, tick.a.60:1 62-63,
    own.a:2 120-121 released run_at=120, own.a:3 180-181 released run_at=180, new:1 4000-4001
    | store own.a:scheduled:3 run_at=240 payload=minutely tick.a.120:ready:0 later tick.a.180:1 200-201
a lease seems to begin later than the step's clock said: old:1 1-2, own.a:1 120-121 released run_at=60, tick.a.60:1 62-63,
    own.a:2 122-160 expired run_at=120, new:1 4000-4001 | store own.a:ready:2 run_at=120 payload=catches_up
the same before the next step: old:1 1-2, own.a:1 120-121 released run_at=60, tick.a.60:1 62-63, new:1 4000-4001
    | store own.a:ready:1 run_at=120 payload=catches_up
rows of that time were removed by retention: old:1 58-59, own.a:1 60-61 released run_at=60, new:1 4000-4001
    | store own.a:scheduled:1 run_at=120 payload=minutely
the log of that queue is empty: own.a:1 60-61 released run_at=60, new:1 4000-4001 queue=q
    | store own.a:scheduled:1 run_at=120 payload=minutely
the rows of that time may not all be there: old:1 1-2, own.a:1 60-61 released run_at=60, new:1 3000-3001
    | store own.a:scheduled:1 run_at=120 payload=minutely
the schedule was deleted and forgotten: old:1 1-2, own.a:1 60-61 released run_at=60, own.a:1 @70 cancelled, new:1 4000-4001
a step that did not end well: old:1 1-2, own.a:1 60-90 expired run_at=60, new:1 4000-4001
    | store own.a:ready:1 run_at=60 payload=minutely
""")

for name in sorted(SCHEDULES.keys() - {"minutely", "catches_up"}):
    CLEAN |= cases(
        f"a schedule that may leave out a tick, {name}: old:1 1-2, own.a:1 60-61 released run_at=60, new:1 4000-4001"
        f" | store own.a:scheduled:1 run_at=120 payload={name}"
    )
CASES = BROKEN | CLEAN
ALIKE = ("state", "fence", "key", "queue", "created_at")


# -- one audit of all ---------------------------------------------------------------------------------------------

DAYS, PER_KIND = 3, 6


class Found(NamedTuple):
    """What the audit says of cases, of drivers and of made-up histories, each a source of its own."""

    violations: dict[str, list[Any]]
    told: dict[str, Told]
    tally: list[Any]
    """Of the clean history: queue, outcome, rows."""
    planted: set[tuple[str, str]]
    """Of the other one: kind, job."""
    rows: int


@pytest.fixture(scope="module", params=["few rows", pytest.param("many rows", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: Any) -> Found:
    seed = random.randrange(2**31)
    print("seed", seed)
    is_small = request.param == "few rows"
    lives, rows = (4, 4_000) if is_small else (40, 30_000)
    told = drivers_lives(tmp_path_factory.mktemp("lives"), seed, lives)
    with nullcontext() if is_small else compiling(spark):
        logs, store, limits = cases_and(spark, told)
        clean, nothing, kept = generate_with_store(spark, rows=rows, seed=seed, days=DAYS)
        wanted = PER_KIND * len(PLANTERS)
        broken, planted, other = generate_with_store(
            spark, rows=rows, seed=seed + 1, days=DAYS, violations=wanted
        )
        for name, log, jobs in (("clean", clean, kept), ("broken", broken, other)):
            rows_of = log.withColumn("source", F.lit(name))
            logs, later = logs.unionByName(rows_of), store.later.unionByName(rows_of)
            jobs = store.jobs.unionByName(jobs.withColumn("source", F.lit(name)))
            store = store._replace(later=later, jobs=jobs)
            limits = limits.unionByName(queue_limits(spark, rows=rows, days=DAYS, source=name))
        logs.persist()
        violations = defaultdict(list)
        for one in audit(logs, stored=store, limits=limits).collect():
            violations[one["source"]].append(one)
        tally = logs.where("source = 'clean'").groupBy("queue", "outcome").count().collect()
        logs.unpersist()
        assert nothing.isEmpty()
        return Found(violations, told, tally, {(one[0], one[1]) for one in planted.collect()}, rows)


def cases_and(spark: SparkSession, told: dict[str, Told]) -> tuple[DataFrame, Stored, DataFrame]:
    """Attempts, the store and limits."""
    rows: list[Row] = []
    later: list[Row] = []
    live: list[Row] = []
    queues: list[tuple[Any, ...]] = [(name, queue, True, None, 0) for name in told for queue in LIFE_QUEUES]
    for name, case in CASES.items():
        made = case.rows()
        rows += [one | {"source": name} for one in made]
        later += [one | {"source": name} for one in [*made, *case.later_rows()]]
        # Where a case says nothing of the store, it has what the log ended with.
        last = {one["job_id"]: {"id": one["job_id"]} | {key: one[key] for key in ALIKE} for one in made}
        jobs = [stored(job) | {"source": name} for job in (last.values() if case.live is None else case.live)]
        live += jobs
        most = case.limits[-1][0] if case.limits else None
        held = sum(job["state"] == "inflight" for job in jobs)
        queues.append((name, "default", case.is_paused, most, held))
    limits = [(name, "default", most, at(seen)) for name, case in CASES.items() for most, seen in case.limits]
    # Operators of simulated fleets change the limits while they run, and the log does not tell when.
    limits += [(name, "limited", LIMIT, at(0)) for name in told if not name.startswith("simulation")]
    logs, kept = frames(spark, told)
    columns = StructType([*ATTEMPT_COLUMNS, StructField("source", StringType())])
    attempts, after = (spark.createDataFrame(one, columns).unionByName(logs) for one in (rows, later))
    job_columns = StructType([*from_arrow_schema(JOBS), StructField("source", StringType())])
    known = spark.createDataFrame(live, job_columns).unionByName(kept)
    seen = spark.createDataFrame(queues, QUEUES)
    store = Stored(known, seen, after, at(READ_AT), WAITING_LIMIT)
    return attempts, store, spark.createDataFrame(limits, LIMITS)


def drivers_lives(folder: Path, seed: int, lives: int) -> dict[str, Told]:
    """Random lives of several clients on every driver, and simulated fleets."""
    postgres = with_fresh_schema(given_or_shared_postgres().url)
    urls = {f"memory {n}": f"memory://audit{seed + n}" for n in range(lives)}
    urls |= {f"sqlite {n}": f"sqlite:///{folder}/{n}.db?durability=normal" for n in range(1 + lives // 10)}
    told = {
        name: asyncio.run(live(url, seed + n, clients=3, steps=120))
        for n, (name, url) in enumerate({**urls, "postgres": postgres}.items())
    }
    drop_schema(postgres)
    for n in range(2 * lives):
        evidence = World(write_scenario(seed + n)).run()
        told[f"simulation {n}"] = list(evidence.ledger.rows), list(evidence.jobs)
    return told


@pytest.mark.parametrize("name", BROKEN)
def test_the_audit_finds_exactly_what_is_wrong(found: Found, name: str) -> None:
    columns = ("kind", "job_id", "other_job_id", "fence", "other_fence")
    seen = [tuple(one[column] for column in columns) for one in found.violations[name]]
    assert Counter(seen) == BROKEN[name].findings()
    for one in found.violations[name]:
        assert one["job_id"] in one["text"]
        assert "2026-03-01 22:" in one["text"] or "2026-03-01 23:" in one["text"]
        assert one["at"] is not None


@pytest.mark.parametrize("name", CLEAN)
def test_the_audit_finds_nothing_where_nothing_is_wrong(found: Found, name: str) -> None:
    assert [one["text"] for one in found.violations[name]] == []


def test_every_kind_has_a_case_and_a_violation_reads_as_a_sentence(found: Found) -> None:
    assert {finding[0] for case in BROKEN.values() for finding in case.findings()} == set(Kind)
    (one,) = found.violations["two leases of a job overlap by a moment"]
    assert one["text"] == (
        "job a was leased (lease 2) at 2026-03-01 22:00:19.999999 while lease 1, from 2026-03-01 22:00:10, "
        "was valid until 2026-03-01 22:00:20"
    )


def test_the_histories_of_all_drivers_are_clean(found: Found) -> None:
    assert len({(one.outcome, one.state) for log, _ in found.told.values() for one in log}) >= 10
    assert [(name, one["text"]) for name in found.told for one in found.violations[name]] == []


def test_made_up_histories_are_clean_and_every_planted_violation_is_found(found: Found) -> None:
    assert sum(one["count"] for one in found.tally) == found.rows
    assert len({one["queue"] for one in found.tally}) == 5
    # Few jobs are requeued or merged: none, perhaps, among few rows.
    assert len({one["outcome"] for one in found.tally}) >= (8 if found.rows > 10_000 else 6)
    assert [one["text"] for one in found.violations["clean"]] == []

    by_kind = Counter(kind for kind, _ in found.planted)
    assert set(by_kind) == set(map(str, PLANTERS))
    assert min(by_kind.values()) >= PER_KIND // 2, "not every place suits every kind"
    seen = found.violations["broken"]
    assert found.planted - {(one["kind"], one["job_id"]) for one in seen} == set()
    # And nobody else is accused. Who happened to be leased in another slot just when that was crowded is rightly named.
    # Their jobs have ended and are not in the store.
    guilty = tuple(job_id for _, job_id in found.planted)
    others = [one for one in seen if one["kind"] != "limit_exceeded"]
    assert [one["text"] for one in others if not one["job_id"].startswith(guilty)] == []


async def test_a_store_is_audited_at_work_and_misses_a_job(spark: SparkSession, postgres_url: str) -> None:
    """Clients go on meanwhile. The job has vanished from the store."""
    async with life_on(postgres_url, random.randrange(2**31), 2) as life:
        known: set[str] = set()
        waiting: set[str] = set()
        while not waiting & known:
            await life.live(60)
            attempts, jobs = await life.told()
            known = {one.job_id for one in attempts}
            waiting = {job.id for job in jobs if job.state is JobState.READY and job.key is None}
        lost = min(waiting & known)
        with Raw(parse_url(postgres_url)) as raw:
            raw("DELETE FROM jobs WHERE id = %s", lost)
        audited = asyncio.create_task(asyncio.to_thread(audit_store, spark, postgres_url))
        while not audited.done():
            await life.live(1)
            await asyncio.wait([audited], timeout=0.5)
        result = await audited
    assert result.kinds == {Kind.LOST_JOB: 1}, result.examples
    assert [example.job_id for example in result.examples] == [lost]
    assert (result.rows >= len(attempts), result.jobs >= len(known)) == (True, True)


# -- made-up histories --------------------------------------------------------------------------------------------


def test_a_seed_makes_the_same_rows_however_many_tasks_share_the_work(spark: SparkSession) -> None:
    once, shared, other = (
        set(generate(spark, rows=600, seed=seed, days=2, violations=20, tasks=tasks)[0].collect())
        for seed, tasks in ((7, 1), (7, 3), (8, 3))
    )
    assert once == shared
    assert once != other


def test_the_command_writes_attempts_queues_and_what_was_planted(spark: SparkSession, tmp_path: Path) -> None:
    nowhere = CliRunner().invoke(root, ["history", "--rows", "10"])
    assert (nowhere.exit_code, "either --lake DIR, --parquet DIR or" in nowhere.output) == (2, True)
    folder = tmp_path / "made"
    words = f"history --rows 500 --days 1 --violations 17 --json --parquet {folder}"
    answer = CliRunner().invoke(root, words.split())
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.stdout)
    names = ("attempts", "queues", "planted")
    found = {name: spark.read.parquet(f"{folder}/{name}").count() for name in names}
    assert found["attempts"] == said["rows"] >= 500
    assert found["planted"] == said["planted"]
    words = f"history --rows 500 --days 1 --violations 17 --json --lake {folder}.lake"
    said = json.loads(CliRunner().invoke(root, words.split()).stdout)
    rows = {name: Lake(f"{folder}.lake").table(f"{name}.attempts").rows for name in ("bronze", "quarantine")}
    assert rows == {"bronze": said["rows"], "quarantine": said["quarantined"]}
    assert (found["queues"], found["planted"] >= 12) == (5, True)
    # The files have no column `source`.
    read = {name: spark.read.parquet(f"{folder}/{name}") for name in names}
    limits = read["queues"].select(
        "queue", "max_inflight", F.lit(START - timedelta(days=365)).alias("observed_at")
    )
    result = summarise(audit(read["attempts"], limits=limits), read["attempts"])
    kinds = {one.kind for one in read["planted"].collect()}
    assert (result.rows, kinds - result.kinds.keys()) == (found["attempts"], set(STORE_KINDS) & kinds)
