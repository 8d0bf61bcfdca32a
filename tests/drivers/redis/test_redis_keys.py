"""The keys of a queue: what each holds, where they live, and that none is left behind once everything has ended and expired."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Coroutine
from typing import Any

import pytest
from msgspec.structs import replace
from redis.crc import key_slot

from drivers.redis.redis_shelf import BOOM, LEASE, Shelf, ack, calls_for, fail, release, token
from records import NOW
from taskharbor.drivers.contract import Discard, JobFilter, QueueSettings, RetryAt
from taskharbor.drivers.redis.library import FAMILIES, LAYOUT, lua
from taskharbor.drivers.redis.options import parse_url
from taskharbor.drivers.redis.store import RedisStore, keys_of
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Attempt, JobState, Micros, Outcome, UpdateFlags
from taskharbor_testkit.conformance.snapshot import list_all, read_log

TYPES = dict(re.findall(r"^local (\w+) +-- (zset|set|hash|list|stream)", lua("queue"), re.MULTILINE))
IN_TROUBLE = {"late", "outbox", "repeated"}
"""Keys that are only there then."""
FOR_GOOD = {"queues", "{q}:meta", "{q}:notify", "{q}:settings", "{failed}:meta", "{failed}:notify"}
SHORT = QueueSettings(keep_done_us=SECOND, keep_dead_us=SECOND, keep_attempts_us=SECOND)
NAMES = ["q", "a b", "a}b", "{a}", "}", "{", "%7D", "%", "ü🚢", "a:b", "*", "x" * 200]


# -- what they hold -----------------------------------------------------------------------------------------


async def test_a_job_moves_from_waiting_to_active_under_its_workers_name(on: Shelf) -> None:
    """ZREM from waiting, waiting_job becomes active_job, id:worker in active until the deadline."""
    job = on.job(key="k")
    await on.enqueue(job)
    assert on.ask("ZSCORE", "waiting", job.id) == str(on.now).encode()
    assert on.ask("HEXISTS", "waiting_job", job.id)
    (held,) = await on.reserve()
    assert on.ask("ZCARD", "waiting") == on.ask("HLEN", "waiting_job") == on.ask("ZCARD", "ready") == 0
    assert on.ask("HKEYS", "active_job") == [held.id.encode()]
    member = f"{held.id}:w1"
    assert on.ask("ZRANGE", "active", 0, -1, "WITHSCORES") == [member.encode(), str(on.now + LEASE).encode()]
    assert on.ask("HGETALL", "active_key") == [b"k", held.id.encode()]
    # A heartbeat moves the deadline of what exists and adds nothing.
    await on.beat(held, lease_for=2 * LEASE)
    assert on.ask("ZSCORE", "active", member) == str(on.now + 2 * LEASE).encode()
    await on.settle(ack(held))
    await on.beat(held)
    assert on.ask("ZCARD", "active") == 0


@pytest.mark.parametrize("worker", ["w", ":", "b:c", "%3A"])
async def test_a_colon_in_an_id_or_a_name_is_not_the_one_between_them(on: Shelf, worker: str) -> None:
    jobs = [on.job(one) for one in ("a", "a:b", "a:b:c", "a%3Ab", "%", ":", "::")]
    await on.enqueue(*jobs)
    held = [*await on.reserve(2, worker=worker), *await on.reserve(10, worker=worker)]
    assert on.ask("ZCARD", "active") == len(jobs)
    await on.beat(held[0])
    await on.settle(ack(held[0]))
    on.now += LEASE
    assert await on.driver.reclaim(now=on.now) == len(jobs) - 1
    again = await on.reserve(10)
    assert [job.id for job in again] == [job.id for job in held[1:]]
    assert {job.stalls for job in again} == {1}


@pytest.mark.parametrize("run_at", [NOW, NOW + SECOND, -5])
async def test_a_blocked_jobs_negative_score_flips_when_the_other_ends(on: Shelf, run_at: Micros) -> None:
    (held,) = await on.claimed(1, key="k")
    blocked = on.job(key="k", run_at_us=run_at)
    await on.enqueue(blocked)
    score = max(run_at, 1)
    assert on.ask("ZSCORE", "waiting", blocked.id) == str(-score).encode()
    assert await on.counts() == {JobState.INFLIGHT: 1, JobState.BLOCKED: 1}
    assert await on.reserve(10) == []
    await on.settle(ack(held))
    assert on.ask("ZSCORE", "waiting", blocked.id) == str(score).encode()
    freed = await on.get(blocked.id)
    assert freed.run_at_us == run_at
    assert freed.state is (JobState.SCHEDULED if run_at > on.now else JobState.READY)


@pytest.mark.parametrize("delay", [0, SECOND])
async def test_a_keyed_job_gets_another_place_in_line_with_its_priority(on: Shelf, delay: Micros) -> None:
    """Also behind other jobs of its type, and among other types."""
    keyed = on.job(key="k", run_at_us=on.now + delay)
    others = [on.job(type=name, priority=1, run_at_us=on.now + delay) for name in ("mail", "other")]
    await on.enqueue(keyed, *others)
    await on.enqueue(on.job(key="k", priority=2, update=UpdateFlags(priority=True)))
    on.now += delay
    assert (await on.get(keyed.id)).priority == 2
    await on.counts()  # Jobs that have come due are in their lines.
    assert on.ask("ZCARD", "ready") == 3
    assert [job.id for job in await on.reserve(1, types=["mail"])] == [keyed.id]
    assert [job.id for job in await on.reserve(3)] == [job.id for job in others]
    assert on.ask("EXISTS", "ready", "scheduled") == 0


async def test_settings_are_kept_as_they_were_given(on: Shelf) -> None:
    """A text that means something in the store is a text of its own in other fields."""
    given = QueueSettings(
        paused=True,
        max_inflight=3,
        failure_queue="ever",
        keep_done_us=None,
        keep_dead_us=0,
        declaration="ever",
    )
    await on.driver.configure("q", given, now=on.now, declares=True)
    assert await on.driver.settings("q") == given
    # Fields that are not named stay, and so does the declaration.
    await on.driver.configure("q", QueueSettings(), now=on.now, fields=["failure_queue", "max_inflight"])
    assert await on.driver.settings("q") == replace(given, failure_queue=None, max_inflight=None)
    assert on.ask("HEXISTS", "settings", "failure_queue") == 0
    # The same declaration changes nothing, another one changes the fields that it names.
    for declaration, is_paused in (("ever", True), ("", False)):
        settings = QueueSettings(declaration=declaration)
        await on.driver.configure("q", settings, now=on.now, fields=["paused"], declares=True)
        stored = await on.driver.settings("q")
        assert (stored.paused, stored.declaration, stored.keep_dead_us) == (is_paused, declaration, 0)


# -- what is left -------------------------------------------------------------------------------------------


async def _everything(on: Shelf) -> None:
    """Jobs that come and go in every way there is."""
    await on.driver.configure("q", replace(SHORT, failure_queue="failed"), now=on.now)
    await on.enqueue(
        *on.jobs(8, max_attempts=9),
        on.job(key="k", idempotency_key="i1"),
        on.job(idempotency_key="i2"),
        *(on.job(key=key, run_at_us=on.now + 5 * SECOND) for key in (None, "later")),
    )
    await on.enqueue(on.job(key="later", idempotency_key="i3", update=UpdateFlags(run_at="yes")))
    done, dead, retried, released, dropped, _, beaten, wanted, keyed, known, moved = await on.reserve(100)
    await on.enqueue(on.job(key="k", idempotency_key="i4"), on.job())
    waiting = [on.job(key="unwanted"), on.job(), on.job(run_at_us=on.now + SECOND)]
    await on.enqueue(*waiting)
    await on.driver.cancel([wanted.id, *(job.id for job in waiting)], now=on.now)
    await on.beat(beaten, b"half", lease_for=2 * LEASE)
    there = {family for family in FAMILIES if on.ask("EXISTS", family)}
    retry = RetryAt(retried.id, token(retried), on.now + SECOND, 1, BOOM)
    discard = Discard(dropped.id, token(dropped), BOOM)
    released_ones = map(release, (released, wanted, keyed))
    await on.settle(ack(done), fail(dead), retry, discard, *released_ones, ack(known), ack(moved))
    there |= {family for family in FAMILIES if on.ask("EXISTS", family)}
    assert there == set(FAMILIES) - IN_TROUBLE
    for family in there:
        assert on.ask("TYPE", family).decode() in (TYPES[family], "none"), family
    await on.driver.requeue([dead.id], now=on.now)
    # A row that ends before one in front of it, because its caller's clock is behind.
    (one,) = await on.reserve()
    assert await on.driver.settle([ack(one)], now=on.now - 10) == [None]
    on.now += LEASE
    await on.driver.reclaim(now=on.now)
    for queue in ("q", "failed"):
        on.now += 3 * LEASE
        while held := await on.reserve(100, queue=queue):
            await on.settle(*map(ack, held))
    assert len(await on.log(dead.id)) == 3
    assert (await on.get(dead.id)).state is JobState.DONE
    await on.driver.wait(["q"], now=on.now, timeout=0)
    assert all(job.state.is_terminal for job in await list_all(on.driver, JobFilter(), on.now))
    assert await on.counts("failed") == {JobState.DONE: 1}


@pytest.mark.parametrize("is_forgetful", [False, True], ids=["usual server", "forgetful server"])
async def test_nothing_but_what_is_documented_remains_when_all_has_ended_and_expired(
    on: Shelf, is_forgetful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a server that forgets all functions before every call."""
    run = RedisStore.run

    def forget_and_run(store: RedisStore, *calls: Any, **options: Any) -> Coroutine[Any, Any, list[Any]]:
        if is_forgetful:
            on.server.execute("FUNCTION", "FLUSH")
        return run(store, *calls, **options)

    monkeypatch.setattr(RedisStore, "run", forget_and_run)
    await _everything(on)
    await on.driver.configure("failed", SHORT, now=on.now)
    on.now += 3600 * SECOND
    while await on.driver.prune(now=on.now, limit=7):
        pass
    assert on.all_keys() == FOR_GOOD | {"{failed}:settings"}


async def test_nothing_remains_of_purged_jobs_either(on: Shelf) -> None:
    await _everything(on)
    while await on.driver.purge(JobFilter(), limit=3):
        pass
    assert on.all_keys() - {"{q}:attempts", "{failed}:attempts", "{q}:late"} == FOR_GOOD


async def test_looking_at_what_does_not_exist_leaves_no_key(on: Shelf) -> None:
    for call in calls_for(on, on.job("x")):
        await call()
    assert on.all_keys() == set()


# -- where they are -----------------------------------------------------------------------------------------


def test_the_keys_of_a_queue_are_in_one_slot_and_no_other_queue_has_them() -> None:
    assert keys_of("", "mail").all[:2] == ("{mail}:waiting", "{mail}:active"), "as seed 002 names them"
    every = [keys_of("p:", queue) for queue in NAMES]
    for keys in every:
        assert len({key_slot(key.encode()) for key in (*keys.all, keys.channel)}) == 1
    queues_key = RedisStore(parse_url("redis://localhost?prefix=p:")).queues_key
    assert len({key for keys in every for key in keys.all} | {queues_key}) == len(NAMES) * len(FAMILIES) + 1


async def test_a_queue_of_any_name_works(on: Shelf) -> None:
    for queue in NAMES:
        await on.enqueue(on.job(queue=queue), on.job(queue="other"))
        (held,) = await on.reserve(queue=queue)
        assert held.queue == queue
        await on.settle(ack(held))
    assert {stats.queue for stats in await on.driver.stats(now=on.now)} == {*NAMES, "other"}
    assert [row.queue for row in (await on.driver.read_attempts()).attempts] == NAMES


async def test_a_server_that_lost_its_data_learns_the_names_of_queues_again(on: Shelf) -> None:
    await on.enqueue(on.job())
    for key in on.all_keys():
        on.server.execute("DEL", on.prefix + key)
    job = on.job()
    await on.enqueue(job, new_ids=True)
    assert [stats.queue for stats in await on.driver.stats(now=on.now)] == ["q"]
    assert (await on.get(job.id)).created_at_us == NOW


@pytest.mark.parametrize("stored", [{"q": "1"}, {"": "2", "q": "1"}, {"": "99"}])
async def test_a_store_of_another_layout_is_refused(on: Shelf, stored: dict[str, str]) -> None:
    for name, value in stored.items():
        on.server.execute("HSET", f"{on.prefix}queues", name, value)
    with pytest.raises(InvalidRequest, match="another layout") as refused:
        await on.driver.clone().open()
    assert on.driver.options.place in str(refused.value)
    with pytest.raises(InvalidRequest, match="another layout"):
        await on.enqueue(on.job())
    assert on.all_keys() == {"queues"}
    assert on.server.execute("HLEN", f"{on.prefix}queues") == len(stored)


def test_a_change_of_the_layout_has_another_number() -> None:
    """A change of `layout.lua` that stored jobs show needs a new LAYOUT_VERSION. Both are noted here."""
    code = re.sub(r"\s*--.*", "", lua("layout"))
    digest = hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest()[:8]
    assert (LAYOUT["LAYOUT_VERSION"], digest) == (5, "d78e39fd")


# -- the attempt log -------------------------------------------------------------------------------------

DAY = 86_400 * SECOND


def entries(on: Shelf) -> int:
    return int(on.ask("XLEN", "attempts"))


async def whole_log(on: Shelf, page_size: int = 1000) -> list[Attempt]:
    return (await read_log(on.driver, limit=page_size)).attempts


async def test_jobs_that_are_done_together_share_entries(on: Shelf) -> None:
    held = await on.claimed(201)
    on.now += 5
    await on.settle(*map(ack, held))
    assert entries(on) == 3
    rows = await whole_log(on)
    assert [row.job_id for row in rows] == [job.id for job in held]
    assert len({row.seq for row in rows}) == len(rows)
    assert {(row.outcome, row.fence, row.worker) for row in rows} == {(Outcome.DONE, 1, "w1")}
    times = {(row.reserved_at_us, row.lease_expires_at_us, row.ended_at_us) for row in rows}
    assert times == {(NOW, NOW + LEASE, NOW + 5)}
    for n in (0, 99, 100, 150, 200):
        assert await on.log(held[n].id) == [rows[n]]


async def test_a_job_finds_its_rows_in_the_entries_of_others(on: Shelf) -> None:
    held = await on.claimed(50)
    for _ in range(4):
        on.now += 1
        await on.settle(*map(release, held))
        held = await on.reserve(50)
    await on.settle(*map(ack, held))
    assert entries(on) == 5
    for job in held[::7]:
        rows = [(row.job_id, row.fence, row.outcome) for row in await on.log(job.id)]
        assert rows[:4] == [(job.id, fence, Outcome.RELEASED) for fence in (1, 2, 3, 4)]
        assert rows[4:] == [(job.id, 5, Outcome.DONE)]


async def test_what_ended_otherwise_has_an_entry_of_its_own(on: Shelf) -> None:
    held = await on.claimed(6, max_attempts=1)
    await on.settle(ack(held[0]), ack(held[1]), fail(held[2]), ack(held[3]))
    on.now += 1
    await on.settle(ack(held[4]))
    held += await on.claimed(1)
    on.now += 1
    await on.settle(*map(ack, held[5:]))
    rows = await whole_log(on)
    assert [row.job_id for row in rows] == [job.id for job in held]
    assert [row.error_message for row in rows] == [None, None, "boom", None, None, None, None]
    assert entries(on) == 6  # Only the first two are alike.


async def test_pages_end_within_entries_and_merge_queues_by_row(on: Shelf) -> None:
    expected: list[str] = []
    # Full entries, half ones and many of one row: a page has to find out how many it takes.
    for n, count in enumerate((130, *[1] * 40, 100, *[3] * 20, 20)):
        held = await on.claimed(count, queue=f"q{n % 3}")
        on.now += 1
        await on.settle(*map(ack, held))
        expected += [job.id for job in held]
    for limit in (7, 99, 100, 101, 1000):
        assert [row.job_id for row in await whole_log(on, limit)] == expected


async def test_a_row_that_retention_took_is_not_looked_for_in_what_came_after(on: Shelf) -> None:
    await on.driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=on.now)
    for _ in range(2):
        (job,) = await on.reserve() or await on.claimed(1)
        await on.settle(release(job))
        on.now += 2 * DAY
    (other,) = await on.claimed(1, priority=1)
    await on.settle(ack(other))
    rows = await on.log(job.id)
    assert [row.fence for row in rows] == [1, 2]
    assert await on.driver.prune(now=on.now - 3 * DAY) == 1
    assert await on.log(job.id) == rows[1:]
    assert await on.driver.prune(now=on.now) == 1
    assert await on.log(job.id) == []
    assert [row.job_id for row in await on.log(other.id)] == [other.id]


async def test_retention_takes_as_many_rows_as_it_may_wherever_entries_end(on: Shelf) -> None:
    await on.driver.configure("q", QueueSettings(keep_attempts_us=DAY), now=on.now)
    late = await on.claimed(10)
    for count in (40, 100, 40):
        held = await on.claimed(count)
        on.now += 10
        await on.settle(*map(ack, held))
    on.now -= 5  # A clock that is behind: these ended before those in front of them.
    await on.settle(*map(ack, late))
    assert (entries(on), on.ask("ZCARD", "late")) == (13, 10)
    rows = await whole_log(on)
    in_front, behind = rows[:180], rows[180:]
    # The first 140 and the late ones are due.
    for limit, left in ((7, 173), (60, 113), (50, 63), (23, 40)):
        assert await on.driver.prune(now=on.now + DAY, limit=limit) == limit
        assert await whole_log(on) == in_front[180 - left :] + behind
        gone, kept = in_front[180 - left - 1], in_front[180 - left]
        assert await on.log(gone.job_id) == []
        assert await on.log(kept.job_id) == [kept]
        assert (await on.driver.read_attempts(limit=1)).attempts == [kept]
    assert await on.driver.prune(now=on.now + DAY, limit=4) == 4
    assert await on.driver.prune(now=on.now + DAY, limit=9) == 6
    assert await whole_log(on) == in_front[140:]
    assert await on.driver.prune(now=on.now + DAY + 5, limit=30) == 30
    assert await whole_log(on) == in_front[170:]
    assert [await on.driver.prune(now=on.now + DAY + 5, limit=30) for _ in range(2)] == [10, 0]
    assert (entries(on), on.ask("EXISTS", "late")) == (0, 0)
    (again,) = await on.claimed(1)
    await on.settle(ack(again))
    assert [row.job_id for row in await whole_log(on)] == [again.id]
