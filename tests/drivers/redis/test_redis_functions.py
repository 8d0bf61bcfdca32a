"""The functions: said in full in their headers, known again after the server forgot them, and whole at any size of batch."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest

from drivers.redis.redis_shelf import BOOM, LEASE, Shelf, ack, shelf, token
from needing import REDIS_VERSIONS
from taskharbor.drivers.contract import (
    Ack,
    Discard,
    Extension,
    Fail,
    JobFilter,
    Page,
    QueueSettings,
    Release,
    Retry,
)
from taskharbor.drivers.redis import operate
from taskharbor.drivers.redis.inspect import list_jobs
from taskharbor.drivers.redis.library import FAMILIES, LAYOUT, LIBRARY, TEXT, layout
from taskharbor.drivers.redis.records import Head, More, constant
from taskharbor.jobs import MAX_PAYLOAD_BYTES, SECOND, Failure, JobState, Outcome
from taskharbor_testkit.servers import RedisServer

SOURCES = {
    file.name.removesuffix(".lua"): file.read_text("utf-8")
    for file in (files("taskharbor.drivers.redis") / "lua").iterdir()
    if file.name.endswith(".lua")
}


# -- how they are written ---------------------------------------------------------------------------------


def test_every_file_is_part_of_the_library_or_of_its_frame() -> None:
    frame = {"export_function", "export_eval", "dispatch"}
    assert {name for name, text in SOURCES.items() if text not in TEXT} == frame


@pytest.mark.parametrize("name", sorted(LIBRARY.flags))
def test_a_function_says_what_it_takes_and_gives(name: str) -> None:
    comment = TEXT.split(f"define('{name}'")[0].rpartition("\n\n")[2]
    for word in ("KEYS", "ARGV", "result"):
        assert re.search(rf"^-- {word}\b", comment, re.M), f"{name} does not say its {word}"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_key_comes_from_KEYS(name: str) -> None:
    """A cluster decides by KEYS where a function runs; a name made up inside it would be looked for in vain."""
    code = re.sub(r"--.*", "", SOURCES[name])
    for command, first in re.findall(r"call\('([A-Z]+)'(?:, ([^,)]+))?", code):
        if command not in ("TIME", "PUBLISH"):
            assert re.fullmatch(r"\w+(\[\w+\])?", first), f"{name}.lua: {command} {first}"
    assert not re.search(r"keys\[\w+\]\s*\.\.|\.\.\s*keys\[", code), f"{name}.lua makes a key of a key"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_line_is_longer_than_it_should_be(name: str) -> None:
    assert max(map(len, SOURCES[name].splitlines())) <= 130


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
    with RedisServer.start(version=version) as server:
        assert server.execute("FUNCTION", "LOAD", LIBRARY.source).decode() == LIBRARY.name
        for name in LIBRARY.flags:
            sha = server.execute("SCRIPT", "LOAD", LIBRARY.scripts[name]).decode()
            assert LIBRARY.hashes[name] == sha


# -- forgotten by the server ------------------------------------------------------------------------------


async def _all_calls(on: Shelf) -> None:
    def forget() -> None:
        on.server.execute("FUNCTION", "FLUSH")

    driver, now = on.driver, on.now
    forget()
    await driver.configure("q", QueueSettings(failure_queue="failed"), now=now)
    forget()
    jobs = [on.job(), on.job(), on.job(key="k"), on.job(queue="r")]
    await on.enqueue(*jobs)
    forget()
    await on.enqueue(on.job(), new_ids=True)
    forget()
    held = await on.reserve(10)
    assert len(held) == 4
    forget()
    (lease,) = await driver.extend_lease([Extension(held[0].id, token(held[0]))], lease_for=LEASE, now=now)
    assert not isinstance(lease, Exception)
    forget()
    (other,) = await on.reserve(queue="r")
    forget()
    # Two queues: a transaction, in which a script that is not known would fail alone.
    await on.settle(ack(held[0]), ack(other), Fail(held[1].id, token(held[1]), 1, BOOM))
    forget()
    assert await driver.cancel([held[2].id], now=now) == [JobState.INFLIGHT]
    forget()
    assert await driver.requeue([held[1].id], now=now) == [JobState.READY]
    forget()
    assert await driver.reclaim(now=now + LEASE) == 2
    forget()
    assert len([one for one in await driver.get([job.id for job in jobs], now=now) if one]) == 4
    forget()
    assert len((await driver.list_jobs(JobFilter(), now=now)).jobs) == 6
    forget()
    assert [stats.queue for stats in await driver.stats(now=now)] == ["failed", "q", "r"]
    forget()
    assert len(await driver.job_attempts(held[1].id)) == 2
    forget()
    assert await driver.purge(JobFilter(states=frozenset({JobState.CANCELLED}))) == 1
    forget()
    await driver.wait(["q"], now=now, timeout=0)
    forget()
    assert await driver.prune(now=now + 3650 * 86_400 * SECOND) > 0


async def test_every_call_works_after_the_server_forgot_the_scripts() -> None:
    async with shelf() as on:
        await _all_calls(on)


async def test_the_library_is_sent_once_and_functions_run_by_name_from_then_on() -> None:
    async with shelf() as on:
        on.server.execute("FUNCTION", "FLUSH")
        await on.enqueue(on.job(), new_ids=True)
        assert on.server.execute("FUNCTION", "LIST", "LIBRARYNAME", LIBRARY.name)


# -- batches of any size ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 1_999, 2_000, 2_001, 9_000])
async def test_a_batch_of_any_size_goes_through_in_one_piece(count: int) -> None:
    """What Lua can hand to one command is limited; what a caller can hand to us is not."""

    async with shelf() as on:
        jobs = [on.job(key=f"k{n}" if n % 100 == 0 else None) for n in range(count)]
        await on.enqueue(*jobs[: count // 2])
        await on.enqueue(*[job for job in jobs[count // 2 :] if job.key], *[])
        await on.enqueue(*[job for job in jobs[count // 2 :] if not job.key], new_ids=True)
        held = await on.reserve(count + 1)
        assert {job.id for job in held} == {job.id for job in jobs}
        beats = [Extension(job.id, token(job), b"half") for job in held]
        leases = await on.driver.extend_lease(beats, lease_for=2 * LEASE, now=on.now)
        assert not any(isinstance(one, Exception) for one in leases)
        await on.settle(*[Release(job.id, token(job)) for job in held])
        held = await on.reserve(count + 1)
        await on.settle(*[ack(job) for job in held])
        (stats,) = await on.driver.stats(now=on.now, queue="q")
        assert stats.counts[JobState.DONE] == stats.done_total == count
        assert await on.driver.purge(JobFilter(), limit=count) == count
        assert on.ask("EXISTS", "finished_job") == 0


async def test_many_leases_that_are_over_are_ended_by_claims_bit_by_bit() -> None:
    async with shelf() as on:
        await on.enqueue(*[on.job() for _ in range(2_500)], new_ids=True)
        assert len(await on.reserve(2_500)) == 2_500
        on.now += LEASE
        claimed = [job for _ in range(4) for job in await on.reserve(800)]
        assert len({job.id for job in claimed}) == 2_500
        assert {job.stalls for job in claimed} == {1}


# -- what passes through them -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload", [b"", bytes(range(256)), b"\x00" * 1000, b"\xc1\xff" * (MAX_PAYLOAD_BYTES // 2)]
)
async def test_bytes_come_through_every_state_unchanged(payload: bytes) -> None:
    async with shelf() as on:
        await on.driver.configure("q", QueueSettings(failure_queue="failed"), now=on.now)
        held = await on.lease(on.job(payload=payload, headers={"ü": "\x01"}, codec="raw", key="k"))
        assert held.payload == payload
        await on.driver.extend_lease(
            [Extension(held.id, token(held), b"\xff\x00")], lease_for=LEASE, now=on.now
        )
        stored = await on.get(held.id)
        assert (stored.payload, stored.progress, stored.headers) == (payload, b"\xff\x00", {"ü": "\x01"})
        await on.settle(Retry(held.id, token(held), on.now, 1, BOOM))
        stored = await on.get(held.id)
        assert (stored.payload, stored.progress) == (payload, None)
        (held,) = await on.reserve()
        await on.settle(Ack(held.id, token(held), payload[:65_536]))
        stored = await on.get(held.id)
        assert (stored.payload, stored.result) == (payload, payload[:65_536])
        dead = await on.lease(on.job(payload=payload))
        await on.settle(Fail(dead.id, token(dead), 1, BOOM))
        assert (await on.get(dead.id)).payload == payload
        assert len(await on.reserve(queue="failed")) == 1


async def test_error_texts_of_any_kind_are_kept() -> None:
    async with shelf() as on:
        odd = Failure.of("Ünï", "lone \ud800 and \x00 and 🚢", "x" * 8_000)
        for end in (Fail, Retry, Discard):
            held = await on.lease(on.job())
            if end is Discard:
                settlement: Fail | Retry | Discard = Discard(held.id, token(held), odd)
            elif end is Retry:
                settlement = Retry(held.id, token(held), on.now + SECOND, 1, odd)
            else:
                settlement = Fail(held.id, token(held), 1, odd)
            assert await on.driver.settle([settlement], now=on.now) == [None]
            stored = await on.get(held.id)
            assert stored.last_error == odd.text
            (row,) = await on.driver.job_attempts(held.id)
            assert (row.error_type, row.error_message) == ("Ünï", "lone \\ud800 and \\0 and 🚢")


async def test_a_purge_leaves_what_was_requeued_after_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelf() as on:
        jobs = [on.job(), on.job()]
        await on.enqueue(*jobs)
        held = await on.reserve(2)
        await on.settle(*[Fail(job.id, token(job), 1, BOOM) for job in held])

        async def list_and_requeue(*given: Any) -> Page:
            page = await list_jobs(*given)
            await on.driver.requeue([jobs[0].id], now=on.now)
            (again,) = await on.reserve()
            on.now += SECOND
            await on.settle(Fail(again.id, token(again), 1, BOOM))
            return page

        monkeypatch.setattr(operate, "list_jobs", list_and_requeue)
        assert await on.driver.purge(JobFilter(), limit=10) == 1
        assert [job.id for job in (await on.driver.list_jobs(JobFilter(), now=on.now)).jobs] == [jobs[0].id]


async def test_an_empty_result_and_an_empty_progress_are_not_none() -> None:
    async with shelf() as on:
        held = await on.lease(on.job())
        await on.driver.extend_lease([Extension(held.id, token(held), b"")], lease_for=LEASE, now=on.now)
        assert (await on.get(held.id)).progress == b""
        await on.settle(Ack(held.id, token(held), b""))
        stored = await on.get(held.id)
        assert (stored.result, stored.progress) == (b"", None)


@pytest.mark.parametrize("count", [1, 5, 2_500])
async def test_ids_that_are_said_to_be_new_are_recognised_when_the_call_is_repeated(count: int) -> None:
    async with shelf() as on:
        jobs = [on.job() for _ in range(count)]
        await on.enqueue(*jobs, new_ids=True)
        (held,) = await on.reserve()
        # One more than before: some are known, some are not.
        late = on.job()
        answers = await on.driver.enqueue([late, *jobs], now=on.now, new_ids=True)
        assert [one.existed for one in answers] == [False] + [True] * count
        assert [one.id for one in answers] == [late.id, *[job.id for job in jobs]]
        assert (await on.get(held.id)).state is JobState.INFLIGHT
        assert on.ask("ZCARD", "jobs") == count + 1
        assert len(await on.reserve(count + 1)) == count


async def test_an_id_is_known_whatever_queue_has_it_and_whoever_made_that_queue() -> None:
    async with shelf() as on:
        await on.enqueue(on.job())
        async with on.driver.clone() as other:
            job = on.job(queue="made later")
            await other.enqueue([job], now=on.now)
        (answer,) = await on.driver.enqueue([on.job(id=job.id)], now=on.now)
        assert (answer.id, answer.existed) == (job.id, True)
        assert on.ask("ZCARD", "jobs") == 1


async def test_one_id_given_to_two_queues_at_once_is_stored_in_the_first() -> None:
    async with shelf() as on:
        one = on.job(queue="a", key="k")
        answers = await on.driver.enqueue([one, on.job(id=one.id, queue="b"), on.job(queue="b")], now=on.now)
        assert [answer.existed for answer in answers] == [False, True, False]
        assert (await on.get(one.id)).queue == "a"
