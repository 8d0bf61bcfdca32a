"""A compare-and-swap object: many calls in one write, every write settled by the object's content, and what is around a state."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.objectstore.fake_blobs import FAULTS, Fault, FaultyBlobs, HeldBlobs, Weather
from drivers.objectstore.marks import NAME, FixedTerm, Marks, add, all_marks, in_virtual_time, marks_object
from taskharbor.drivers.objectstore import cas as cas_module
from taskharbor.drivers.objectstore.blobs import Blob
from taskharbor.drivers.objectstore.cas import RING, CasObject, Deposed, Header, seal, unseal
from taskharbor.drivers.objectstore.leadership import raise_epochs
from taskharbor.errors import BackendUnavailable, InvalidRequest, SchemaMismatch


class Stage:
    """A store, its weather, and handles on it."""

    def __init__(self) -> None:
        self.held = HeldBlobs()
        self.weather = Weather()
        self.blobs = FaultyBlobs(self.held, self.weather)
        self.cas = marks_object(self.blobs)

    def another(self) -> CasObject[Marks]:
        return marks_object(self.blobs)

    async def leader(self, epoch: int = 1) -> CasObject[Marks]:
        """A handle of a new leader, which has raised the epoch."""
        await raise_epochs(self.held, [NAME], FixedTerm(epoch))
        return marks_object(self.blobs, term=FixedTerm(epoch))

    async def landed(self) -> list[str]:
        return await marks_object(self.held).look(all_marks)

    @property
    def header(self) -> Header:
        return unseal(self.held.objects[NAME].data, NAME)[0]


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - single turns of the loop are the point
        await asyncio.sleep(0)


# -- group commit -----------------------------------------------------------------------------------------


async def test_calls_that_arrive_while_a_write_is_under_way_go_into_the_next_one(stage: Stage) -> None:
    places = await asyncio.gather(*(stage.cas.change(add(f"m{number}")) for number in range(100)))
    assert stage.weather.writes == 1
    assert places == list(range(100))
    first = asyncio.ensure_future(stage.cas.change(add("first")))
    await until(lambda: stage.weather.writes > 1)
    rest = [asyncio.ensure_future(stage.cas.change(add(f"r{number}"))) for number in range(50)]
    assert not first.done()
    await asyncio.gather(first, *rest)
    assert stage.weather.writes == 3
    assert await stage.cas.change(all_marks) == await stage.cas.look(all_marks)
    assert stage.weather.writes == 3, "a pass that touches nothing writes nothing"


@in_virtual_time
async def test_callers_who_come_back_share_the_next_write_and_nobody_else_is_waited_for(stage: Stage) -> None:
    """Writes take a second, and clients come back a little after each answer."""
    stage.weather.write_seconds = 1.0

    async def client(number: int, rounds: int) -> None:
        for turn in range(rounds):
            await stage.cas.change(add(f"{number}.{turn}"))
            await asyncio.sleep(0.001 * number)

    async def seconds(*, clients: int, rounds: int) -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(client(number, rounds) for number in range(clients)))
        return asyncio.get_running_loop().time() - began

    assert await seconds(clients=1, rounds=10) == pytest.approx(10)
    # Without a pause for them to come back, each call would wait for two writes.
    assert await seconds(clients=20, rounds=10) < 10 * 1.05
    assert stage.weather.writes == 20
    await seconds(clients=20, rounds=1)
    # The others have gone: this one is put off by no more than a twentieth of a second, and the next not at all.
    assert 5 <= await seconds(clients=1, rounds=5) <= 5.06
    keeping = [stage.cas.change(add(f"kept {number}"), is_housekeeping=True) for number in range(3)]
    _, spent = await asyncio.gather(asyncio.gather(*keeping), seconds(clients=1, rounds=10))
    assert spent < 11.01


async def test_a_step_that_raises_gets_its_own_error_and_the_others_go_on(stage: Stage) -> None:
    def refuse(state: Marks) -> int:
        raise InvalidRequest("not this one")

    answers = await asyncio.gather(
        *map(stage.cas.change, (add("a"), refuse, add("b"))), return_exceptions=True
    )
    assert (answers[0], type(answers[1]), answers[2]) == (0, InvalidRequest, 1)
    assert await stage.landed() == ["a", "b"]


async def test_who_left_changes_nothing_and_a_closed_object_answers_what_it_has(stage: Stage) -> None:
    first = asyncio.ensure_future(stage.cas.change(add("one")))
    await asyncio.sleep(0)
    left = asyncio.ensure_future(stage.cas.change(add("gone")))
    await asyncio.sleep(0)
    left.cancel()
    await first
    last = asyncio.ensure_future(stage.cas.change(add("two")))
    await asyncio.sleep(0)
    await stage.cas.close()
    assert await last == 1
    with pytest.raises(BackendUnavailable, match="closed"):
        await stage.cas.change(add("late"))
    assert await stage.landed() == ["one", "two"]


# -- writes without a certain answer ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("before", [[], ["before"]], ids=["created", "replaced"])
async def test_a_change_is_made_once_whatever_happens(stage: Stage, fault: Fault, before: list[str]) -> None:
    for mark in before:
        await stage.cas.change(add(mark))
    stage.weather.next_write(fault)
    assert await stage.cas.change(add("mark")) == len(before)
    await stage.weather.land()
    assert await stage.landed() == [*before, "mark"]
    assert await stage.cas.change(add("after")) == len(before) + 1
    assert await stage.landed() == [*before, "mark", "after"]


@pytest.mark.parametrize("later", [[], [Fault.LOST_BEFORE]], ids=["before the second try", "after it"])
async def test_a_late_write_is_recognised(stage: Stage, later: list[Fault]) -> None:
    await stage.cas.change(add("before"))
    stage.weather.next_write(Fault.LATE, *later)
    reads, writes = stage.weather.reads, stage.weather.writes
    answer = asyncio.ensure_future(stage.cas.change(add("mark")))
    # The look has been answered by now, or is about to be: before it or after it, the write lands once.
    await until(lambda: stage.weather.reads > reads and stage.weather.writes > writes + len(later))
    await stage.weather.land()
    assert await answer == 1
    assert await stage.landed() == ["before", "mark"]


@pytest.mark.parametrize("followers", [10, RING])
async def test_a_write_that_landed_is_told_or_not_guessed_about(stage: Stage, followers: int) -> None:
    """The ring of commit ids tells, unless so many others followed that it has forgotten."""
    other = marks_object(stage.held)
    await stage.cas.change(add("before"))
    stage.weather.next_write(Fault.REFUSED_AFTER)
    answer = asyncio.ensure_future(stage.cas.change(add("mark")))
    await until(lambda: stage.header.serial == 2)
    read = stage.held.read

    async def read_much_later(name: str, *rest: Any) -> Blob | None:
        stage.held.read = read  # type: ignore[method-assign]
        for number in range(followers):
            await other.change(add(f"other {number}"))
        return await read(name, *rest)

    stage.held.read = read_much_later  # type: ignore[method-assign,assignment]
    if followers < RING:
        assert await answer == 1
    else:
        with pytest.raises(BackendUnavailable, match="repeating it is safe"):
            await answer
    assert (await stage.landed()).count("mark") == 1


@in_virtual_time
async def test_a_store_that_never_confirms_a_write_is_given_up_in_time(stage: Stage) -> None:
    cas = marks_object(stage.blobs, give_up_after=10.0)
    stage.weather.next_write(*[Fault.LOST_BEFORE] * 1000)
    began = asyncio.get_running_loop().time()
    with pytest.raises(BackendUnavailable, match="repeating it is safe"):
        await cas.change(add("mark"))
    assert 10.0 <= asyncio.get_running_loop().time() - began < 12.0
    stage.weather.clear_up()
    assert await cas.change(add("after")) == 0


async def test_an_older_content_is_not_believed_once_a_newer_one_was_seen(stage: Stage) -> None:
    await stage.cas.change(add("a"))
    old = stage.held.objects[NAME]
    await stage.cas.change(add("b"))
    await stage.another().change(add("c"))
    read = stage.held.read
    stale = [old, old]

    async def read_stale(name: str, *rest: Any) -> Blob | None:
        return stale.pop() if stale else await read(name, *rest)

    stage.held.read = read_stale  # type: ignore[method-assign,assignment]
    assert await stage.cas.change(add("d")) == 3
    assert await stage.cas.look(all_marks) == ["a", "b", "c", "d"]


@in_virtual_time
async def test_an_object_that_was_removed_is_made_again(stage: Stage) -> None:
    await stage.cas.change(add("a"))
    await stage.held.delete([NAME])
    assert await stage.cas.change(add("b")) == 0
    assert await stage.landed() == ["b"]


# -- leading ----------------------------------------------------------------------------------------------


async def test_a_leader_reads_nothing_in_its_term_and_never_writes_under_a_newer_epoch(stage: Stage) -> None:
    await raise_epochs(stage.held, [NAME], FixedTerm(1))
    term = FixedTerm(1)
    old = marks_object(stage.blobs, term=term)
    await old.change(add("a"))
    reads = stage.weather.reads
    for _ in range(5):
        assert await old.look(all_marks) == await old.change(all_marks) == ["a"]
    assert stage.weather.reads == reads
    term.end()
    assert await old.look(all_marks) == ["a"]
    assert stage.weather.reads == reads + 1, "without a valid term it looks first"

    new = await stage.leader(2)
    assert await new.change(add("b")) == 1
    late = [old.change(add(f"late {number}")) for number in range(3)]
    answers = await asyncio.gather(*late, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Deposed] * 3
    writes = stage.weather.writes
    for call in (old.change(add("later")), old.look(all_marks)):
        with pytest.raises(Deposed):
            await call
    assert stage.weather.writes == writes
    assert await stage.landed() == ["a", "b"]
    assert stage.header.epoch == 2

    await raise_epochs(stage.held, [NAME], FixedTerm(3))
    old.lead(FixedTerm(3))
    assert await old.change(add("c")) == 2, "it leads again, from the stored content"
    old.lead(None)
    assert await old.look(all_marks) == ["a", "b", "c"]


async def test_a_deposed_leader_still_answers_for_the_write_that_had_landed(stage: Stage) -> None:
    old = await stage.leader(1)
    await old.change(add("a"))
    stage.weather.next_write(Fault.LOST_AFTER)
    serial = stage.header.serial
    answer = asyncio.ensure_future(old.change(add("b")))
    await until(lambda: stage.header.serial > serial)
    await raise_epochs(stage.held, [NAME], FixedTerm(2))
    assert await answer == 1
    with pytest.raises(Deposed):
        await old.change(add("c"))
    assert await stage.landed() == ["a", "b"]


async def test_writers_beside_a_leader_are_safe_and_seen_after_a_refresh(stage: Stage) -> None:
    await stage.cas.change(add("a"))
    leader = marks_object(stage.blobs, term=FixedTerm(1))
    assert await leader.look(all_marks) == ["a"]
    await stage.cas.change(add("b"))
    assert await leader.look(all_marks) == ["a", "b"], "an object without our epoch is compared first"
    await leader.change(add("c"))
    await stage.cas.change(add("d"))
    assert stage.header.epoch == 1, "a direct writer leaves the epoch as it is"
    await leader.refresh()
    assert await leader.look(all_marks) == ["a", "b", "c", "d"]
    await stage.cas.change(add("e"))
    assert await leader.change(add("f")) == 5


@pytest.mark.parametrize("fault", FAULTS)
async def test_raising_an_epoch_survives_every_fault_and_keeps_the_state(stage: Stage, fault: Fault) -> None:
    await stage.cas.change(add("a"))
    stage.weather.next_write(fault)
    names = [NAME, *(f"queues/q{number}/0/state" for number in range(40))]
    await raise_epochs(stage.blobs, names, FixedTerm(7))
    await stage.weather.land()
    assert {unseal(blob.data, "")[0].epoch for blob in stage.held.objects.values()} == {7}
    assert sorted(stage.held.objects) == sorted(names)
    assert await stage.landed() == ["a"]
    with pytest.raises(ExceptionGroup):
        await raise_epochs(stage.blobs, names, FixedTerm(6))
    assert stage.header.epoch == 7, "never back"


# -- what is around a state -------------------------------------------------------------------------------


async def test_a_state_that_grows_large_is_warned_about_once(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cas_module, "WARN_BYTES", 100)
    for number in range(10):
        await stage.cas.change(add(f"{number}" * 20))
    assert stage.cas.size > 200
    assert sum("MiB" in record.message and "shards" in record.message for record in caplog.records) == 1


async def test_a_large_state_is_compressed_on_its_way_to_a_remote_store(stage: Stage) -> None:
    stage.held.is_remote = True
    await marks_object(stage.held).change(add("x" * 1_000_000))
    assert len(stage.held.objects[NAME].data) < 20_000
    assert await stage.landed() == ["x" * 1_000_000]


@given(commits=st.integers(0, 3 * RING), asked=st.integers(1, 4 * RING))
def test_the_ring_tells_the_fate_of_every_write(commits: int, asked: int) -> None:
    header = Header()
    ids = [secrets.token_bytes(8) for _ in range(commits)]
    for commit in ids:
        header = header.after(commit, epoch=0)
    assert header.serial == commits
    if asked > commits:
        assert header.fate(asked, bytes(8)) == "open"
    elif asked <= commits - RING:
        assert header.fate(asked, ids[asked - 1]) == "forgotten"
    else:
        assert header.fate(asked, ids[asked - 1]) == "landed"
        assert header.fate(asked, bytes(8)) == "refused"


@given(st.binary(max_size=200))
def test_anything_else_is_refused_with_its_name(data: bytes) -> None:
    with pytest.raises(BackendUnavailable, match="the-object is damaged"):
        unseal(data, "the-object")


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"format 4.*use a newer one"):
        unseal(b"".join(seal(Header(format=4), b"")), "the-object")


@pytest.mark.parametrize("compress", [False, True])
def test_one_flipped_bit_is_noticed_wherever_it_is(compress: bool) -> None:
    """Or makes no difference: the last byte of a compressed body has bits that nobody reads."""
    header = Header().after(bytes(8), epoch=3)
    whole = b"".join(seal(header, b"the body of an object" * 10, compress=compress))
    messages: list[str] = []
    for at in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            try:
                found = unseal(bytes(data), "the-object")
            except (BackendUnavailable, SchemaMismatch) as error:
                messages.append(str(error))
            else:
                assert found == unseal(whole, "the-object")
    assert len(messages) >= 8 * len(whole) - 8
    assert all("the-object" in message for message in messages)
