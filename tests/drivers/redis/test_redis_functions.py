"""The functions: said in full in their headers, known again after the server forgot them, and whole at any size of batch."""

from __future__ import annotations

import itertools
import random
import re
from importlib.resources import files
from typing import Any

import msgspec
import pytest

from drivers.redis.redis_shelf import BOOM, LEASE, Shelf, ack, fail, shelf, token
from needing import REDIS_VERSIONS
from records import NOW
from taskharbor.drivers.contract import Ack, Enqueued, Extension, JobFilter, Page, QueueSettings, RetryAt
from taskharbor.drivers.redis import operate
from taskharbor.drivers.redis.library import FAMILIES, LAYOUT, LIBRARY, TEXT, Library, layout
from taskharbor.drivers.redis.operate import list_jobs
from taskharbor.drivers.redis.records import Head, More, constant
from taskharbor.drivers.redis.store import RedisStore
from taskharbor.jobs import MAX_PAYLOAD_BYTES, SECOND, JobState, Outcome
from taskharbor_testkit.conformance.snapshot import list_all
from taskharbor_testkit.servers import shared_redis

LUA = (files("taskharbor.drivers.redis") / "lua").iterdir()
SOURCES = {one.name[:-4]: one.read_text("utf-8") for one in LUA if one.name.endswith(".lua")}


# -- how they are written ---------------------------------------------------------------------------------


def test_every_file_is_part_of_the_library_or_of_its_frame() -> None:
    frame = {"export_function", "export_eval", "dispatch"}
    assert {name for name, text in SOURCES.items() if text not in TEXT} == frame
    assert max(len(line) for text in SOURCES.values() for line in text.splitlines()) <= 130


@pytest.mark.parametrize("name", sorted(LIBRARY.flags))
def test_a_function_says_what_it_takes_and_gives(name: str) -> None:
    comment = TEXT.split(f"define('{name}'")[0].rpartition("\n\n")[2]
    for word in ("KEYS", "ARGV", "result"):
        assert re.search(rf"^-- {word}\b", comment, re.M), f"{name} does not say its {word}"


def test_every_key_comes_from_KEYS() -> None:
    """A cluster decides by KEYS where a function runs; a name made up inside it would be looked for in vain."""
    code = re.sub(r"--.*", "", TEXT)
    for command, first in re.findall(r"call\('([A-Z]+)'(?:, ([^,)]+))?", code):
        assert command in ("TIME", "PUBLISH") or re.fullmatch(r"\w+(\[\w+\])?", first), f"{command} {first}"
    assert not re.search(r"keys\[\w+\]\s*\.\.|\.\.\s*keys\[", code), "a key is made of a key"


def test_stored_records_have_the_layout_that_lua_defines() -> None:
    assert [LAYOUT[constant(name)] for name in Head.__struct_fields__] == list(range(1, 13))
    assert {LAYOUT[constant(name)] for name in More.__struct_fields__} == set(More.__struct_encode_fields__)
    assert [LAYOUT[state.name] for state in JobState] == list(range(len(JobState)))
    named = [f"OUTCOME_{one.name}" if one.name in JobState.__members__ else one.name for one in Outcome]
    assert [LAYOUT[name] for name in named] == list(range(len(Outcome)))
    sizes = layout("FRONT").size, layout("SEQ").size, layout("PLACE").size
    assert (LAYOUT["PLAIN_AT"], LAYOUT["SEQ_SIZE"], LAYOUT["PLACE_SIZE"]) == sizes


def test_a_call_sets_all_keys_in_the_order_they_are_declared_in() -> None:
    names = re.search(r"function begin\(keys, args\)\n(.+?) = unpack\(keys\)", SOURCES["define"], re.S)
    assert names is not None
    assert tuple(re.findall(r"\w+", names[1])) == FAMILIES


@pytest.mark.parametrize("version", REDIS_VERSIONS)
def test_every_server_takes_the_library_and_its_scripts(version: str) -> None:
    server = shared_redis(version)
    server.execute("FUNCTION", "FLUSH")
    assert server.execute("FUNCTION", "LOAD", LIBRARY.source).decode() == LIBRARY.name
    for name, script in LIBRARY.scripts.items():
        assert LIBRARY.hashes[name] == server.execute("SCRIPT", "LOAD", script).decode()


# -- batches of any size ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [1, 2_001, 4_500, *(pytest.param(n, marks=pytest.mark.slow) for n in (1_999, 2_000, 9_000))]
)
async def test_a_batch_of_any_size_goes_through_in_one_piece(on: Shelf, count: int) -> None:
    """What Lua can hand to one command is limited; what a caller can hand to us is not."""
    jobs = [on.job(key=f"k{n}" if n % 100 == 0 else None) for n in range(count)]
    await on.enqueue(*jobs[: count // 2])
    await on.enqueue(*[job for job in jobs[count // 2 :] if job.key])
    await on.enqueue(*[job for job in jobs[count // 2 :] if not job.key], new_ids=True)
    held = await on.reserve(count + 1)
    assert {job.id for job in held} == {job.id for job in jobs}
    beats = [Extension(job.id, token(job), b"half") for job in held]
    leases = await on.driver.extend_lease(beats, lease_for=2 * LEASE, now=on.now)
    assert not any(isinstance(one, Exception) for one in leases)
    # Leases that are over are ended a few at a time.
    on.now += 2 * LEASE
    assert await on.driver.reclaim(now=on.now, limit=count) == count
    await on.settle(*map(ack, await on.reserve(count + 1)))
    (stats,) = await on.driver.stats(now=on.now, queue="q")
    assert stats.counts[JobState.DONE] == stats.done_total == count
    assert await on.driver.purge(JobFilter(), limit=count) == count
    assert on.ask("EXISTS", "finished_job") == 0


async def test_a_claim_ends_at_most_a_thousand_leases_that_are_over(on: Shelf) -> None:
    await on.claimed(1_300)
    on.now += LEASE
    assert await on.driver.reclaim(now=on.now, limit=120) == 120
    assert on.ask("ZCARD", "active") == 1_180
    claimed = await on.reserve(600)
    assert on.ask("ZCARD", "active") == 180 + 600
    claimed += [job for _ in range(2) for job in await on.reserve(600)]
    assert len({job.id for job in claimed}) == 1_300
    assert {job.stalls for job in claimed} == {1}


# -- what passes through them -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload", [b"", bytes(range(256)), b"\x00" * 1000, b"\xc1\xff" * (MAX_PAYLOAD_BYTES // 2)], ids=len
)
async def test_bytes_come_through_every_state_unchanged(on: Shelf, payload: bytes) -> None:
    await on.driver.configure("q", QueueSettings(failure_queue="failed"), now=on.now)
    (held,) = await on.claimed(1, payload=payload, headers={"ü": "\x01"}, codec="raw", key="k")
    assert held.payload == payload
    for progress in (b"", b"\xff\x00"):
        await on.beat(held, progress)
        stored = await on.get(held.id)
        assert (stored.payload, stored.progress, stored.headers) == (payload, progress, {"ü": "\x01"})
    await on.settle(RetryAt(held.id, token(held), on.now, 1, BOOM))
    stored = await on.get(held.id)
    assert (stored.payload, stored.progress) == (payload, None)
    (held,) = await on.reserve()
    await on.settle(Ack(held.id, token(held), payload[:65_536]))
    stored = await on.get(held.id)
    assert (stored.payload, stored.result) == (payload, payload[:65_536])
    dead = [(await on.claimed(1, payload=payload, key=key))[0] for key in ("ü", None)]
    await on.settle(*map(fail, dead))
    assert (await on.get(dead[0].id)).payload == payload
    told = [msgspec.json.decode(job.payload) for job in await on.reserve(2, queue="failed")]
    assert [(one["job_id"], one["key"]) for one in told] == [(dead[0].id, "ü"), (dead[1].id, None)]


async def test_a_purge_leaves_what_was_requeued_meanwhile(on: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await on.claimed(2)
    await on.settle(*map(fail, held))

    async def list_and_requeue(*given: Any) -> Page:
        page = await list_jobs(*given)
        await on.driver.requeue([held[0].id], now=on.now)
        (again,) = await on.reserve()
        on.now += SECOND
        await on.settle(fail(again))
        return page

    monkeypatch.setattr(operate, "list_jobs", list_and_requeue)
    assert await on.driver.purge(JobFilter(), limit=10) == 1
    assert [job.id for job in await list_all(on.driver, JobFilter(), on.now)] == [held[0].id]


async def test_ids_that_are_said_to_be_new_are_recognised_when_the_call_is_repeated(on: Shelf) -> None:
    jobs = on.jobs(2_500)
    await on.enqueue(*jobs, new_ids=True)
    (held,) = await on.reserve()
    # One more than before: some are known, some are not.
    more = [on.job(), *jobs]
    answers = await on.driver.enqueue(more, now=on.now, new_ids=True)
    assert answers == [Enqueued(job.id, existed=job is not more[0]) for job in more]
    assert (await on.get(held.id)).state is JobState.INFLIGHT
    assert len(await on.reserve(len(more))) == len(jobs)


async def test_an_id_is_known_whatever_queue_has_it_and_whoever_made_that_queue(on: Shelf) -> None:
    await on.enqueue(on.job())
    async with on.driver.clone() as other:
        job = on.job(queue="made later")
        await other.enqueue([job], now=on.now)
    (answer,) = await on.driver.enqueue([on.job(job.id)], now=on.now)
    assert (answer.id, answer.existed) == (job.id, True)
    assert on.ask("ZCARD", "jobs") == 1
    # In one call it is stored in the first.
    one = on.job(queue="a", key="k")
    answers = await on.driver.enqueue([one, on.job(one.id, queue="b"), on.job(queue="b")], now=on.now)
    assert [answer.existed for answer in answers] == [False, True, False]
    assert (await on.get(one.id)).queue == "a"


# -- who comes next --------------------------------------------------------------------------------------

TRAPS = ["a", "a\x01", "a\x01b", "ab", "b", "\x01", "\x01\x02", "\xff\xff", "ÿ", "aa", "A", "x" * 200]
"""Types that begin like each other, or like what stands between a type and a place in line."""


@pytest.mark.parametrize("seed", range(3))
async def test_a_claim_by_type_takes_those_types_and_no_others(on: Shelf, seed: int) -> None:
    dice = random.Random(seed)
    jobs = [on.job(type=name, priority=dice.randint(-1, 1)) for name in dice.choices(TRAPS, k=150)]
    await on.enqueue(*jobs, new_ids=True)
    left = sorted(jobs, key=lambda job: -job.priority)
    while left:
        types = dice.sample(TRAPS, dice.randint(1, 4))
        limit = dice.randint(1, 20)
        wanted = [job for job in left if job.type in types][:limit]
        held = await on.reserve(limit, types=[*types, types[0], "nobody"])
        assert [job.id for job in held] == [job.id for job in wanted]
        left = [job for job in left if job not in wanted]
    assert on.ask("EXISTS", "ready") == 0


async def test_what_is_not_due_to_this_caller_is_passed_over_in_every_rank(on: Shelf) -> None:
    """A producer whose clock is ahead put it in line."""
    on.now = NOW + 10
    early = [on.job(priority=n % 5, run_at_us=NOW + 10) for n in range(50)]
    due = [on.job(priority=n % 5, run_at_us=NOW, type=f"t{n % 2}") for n in range(50)]
    await on.enqueue(*early, *due, new_ids=True)
    on.now = NOW
    wanted = [job.id for job in sorted(due, key=lambda job: -job.priority)]
    assert [job.id for job in await on.reserve(7)] == wanted[:7]
    assert [job.id for job in await on.reserve(100)] == wanted[7:]
    assert await on.reserve(100, types=["mail"]) == []
    on.now += 10
    assert len(await on.reserve(100)) == 50


async def test_more_jobs_come_due_at_one_instant_than_a_claim_promotes(on: Shelf) -> None:
    jobs = on.jobs(11_000, run_at_us=NOW + SECOND)
    await on.enqueue(*jobs, new_ids=True)
    on.now += SECOND
    assert await on.counts() == {JobState.READY: len(jobs)}
    claimed: set[str] = set()
    while held := await on.reserve(6_000):
        claimed |= {job.id for job in held}
    assert claimed == {job.id for job in jobs}
    assert on.ask("EXISTS", "scheduled") == 0


@pytest.mark.parametrize("few", [3, 10_000], ids=lambda few: f"few is {few}")
async def test_a_listing_by_state_is_the_same_either_way(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are few of a kind they are put in order, else all jobs are looked through, a portion at a time."""
    text = re.sub(r"local FEW = \d+", f"local FEW = {few}", TEXT)
    text, changed = re.subn(r"local LOOK_AT = \d+", "local LOOK_AT = 5", text)
    assert changed
    monkeypatch.setattr(RedisStore.__init__, "__defaults__", (Library(text),))

    async with shelf() as on:
        dice = random.Random(few)
        await on.enqueue(*[on.job(queue=f"q{n % 2}", key=f"k{n}" if n % 3 == 0 else None) for n in range(60)])
        held = [job for n in range(2) for job in await on.reserve(20, queue=f"q{n}")]
        await on.enqueue(*[on.job(queue=job.queue, key=job.key) for job in held if job.key])
        await on.enqueue(*on.jobs(7, queue="q0", run_at_us=NOW + SECOND))
        dice.shuffle(held)
        await on.settle(*map(ack, held[:15]), *map(fail, held[15:25]))
        await on.driver.cancel([job.id for job in held[25:30]], now=on.now)
        everything = await list_all(on.driver, JobFilter(), on.now)
        assert {job.state for job in everything} >= set(JobState) - {JobState.CANCELLED}
        for states, queue in itertools.product(itertools.combinations(JobState, 2), (None, "q0")):
            wanted = [job for job in everything if job.state in states and queue in (None, job.queue)]
            chosen = JobFilter(states=frozenset(states), queue=queue)
            assert await list_all(on.driver, chosen, on.now, 4) == wanted, states
