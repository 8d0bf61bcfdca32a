"""A compare-and-swap object: many calls in one write, and every write settled by what the object says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from drivers.objectstore.faulty_blobs import Fault, Faults, FaultyBlobs, Weather
from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.marks import NAME, FixedTerm, Marks, add, all_marks, marks_object
from drivers.objectstore.virtual_time import VirtualLoop
from taskharbor.drivers.objectstore import cas as cas_module
from taskharbor.drivers.objectstore.blobs import Blob
from taskharbor.drivers.objectstore.cas import CasObject, Deposed, unseal
from taskharbor.drivers.objectstore.leadership import raise_epochs
from taskharbor.errors import BackendUnavailable, InvalidRequest


def run(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story)


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop, which is all that time is here."""
    while not condition():  # noqa: ASYNC110 - single turns are the point
        await asyncio.sleep(0)


class Stage:
    """A store, its weather, and handles on it."""

    def __init__(self) -> None:
        self.held = HeldBlobs()
        self.weather = Weather()
        self.blobs = FaultyBlobs(self.held, self.weather)

    async def landed(self) -> list[str]:
        return await marks_object(self.held).look(all_marks)

    @property
    def epoch(self) -> int:
        return unseal(self.held.objects[NAME].data, NAME)[0].epoch

    @property
    def serial(self) -> int:
        return unseal(self.held.objects[NAME].data, NAME)[0].serial


# -- group commit -----------------------------------------------------------------------------------------


def test_what_arrives_while_a_write_is_under_way_goes_into_the_next_one() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        places = await asyncio.gather(*(cas.change(add(f"m{number}")) for number in range(100)))
        assert stage.weather.writes == 1
        assert places == list(range(100))

        first = asyncio.ensure_future(cas.change(add("first")))
        await until(lambda: stage.weather.writes > 1)
        rest = [asyncio.ensure_future(cas.change(add(f"r{number}"))) for number in range(50)]
        assert not first.done()
        await asyncio.gather(first, *rest)
        assert stage.weather.writes == 3

    run(story())


class _Far:
    """A store whose writes take a second, and clients that come back a little after each answer."""

    def __init__(self, clients: int, rounds: int) -> None:
        self.weather = Weather(faults=Faults(write_seconds=1.0))
        self.state = marks_object(FaultyBlobs(HeldBlobs(), self.weather))
        self.clients, self.rounds = clients, rounds

    async def seconds(self) -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._client(number) for number in range(self.clients)))
        return asyncio.get_running_loop().time() - began

    async def _client(self, number: int) -> None:
        for turn in range(self.rounds):
            await self.state.change(add(f"{number}.{turn}"))
            await asyncio.sleep(0.001 * number)


def test_those_who_come_back_are_together_in_the_next_write() -> None:
    async def story() -> None:
        far = _Far(clients=20, rounds=10)
        # Without a pause for them to come back, each call would wait for two writes.
        assert await far.seconds() < 10 * 1.05
        assert far.weather.writes == 10

    run(story())


def test_housekeeping_is_not_waited_for() -> None:
    async def story() -> None:
        far = _Far(clients=1, rounds=10)
        keeping = asyncio.gather(
            *(far.state.change(add(f"kept {number}"), is_housekeeping=True) for number in range(3))
        )
        assert await far.seconds() <= 10 + 1.0
        await keeping

    run(story())


def test_one_who_comes_alone_waits_for_nobody() -> None:
    async def story() -> None:
        far = _Far(clients=1, rounds=10)
        assert await far.seconds() == pytest.approx(10)

    run(story())


def test_those_who_do_not_come_back_are_waited_for_once() -> None:
    async def story() -> None:
        far = _Far(clients=20, rounds=1)
        await far.seconds()
        # The others have gone: this one is put off by no more than a twentieth of a second, and the next not at all.
        far.clients, far.rounds = 1, 5
        assert 5 <= await far.seconds() <= 5.06

    run(story())


def test_nobody_is_answered_before_the_write_has_landed() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        answer = asyncio.ensure_future(cas.change(add("mark")))
        while not answer.done():
            if NAME not in stage.held.objects:
                assert not answer.done()
            await asyncio.sleep(0)
        assert await stage.landed() == ["mark"]

    run(story())


def test_a_look_never_sees_what_has_not_landed() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        await cas.change(add("one"))
        stage.weather.next_write(Fault.LOST_BEFORE, Fault.LOST_BEFORE)
        change = asyncio.ensure_future(cas.change(add("two")))
        looks = []
        while not change.done():
            looks.append((list(await stage.landed()), await cas.look(all_marks)))
        assert await change == 1
        for before, seen in looks:
            assert seen[: len(before)] == before

    run(story())


def test_a_pass_that_touches_nothing_writes_nothing() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        await cas.change(add("mark"))
        assert await cas.change(all_marks) == ["mark"]
        assert await cas.look(all_marks) == ["mark"]
        assert stage.weather.writes == 1

    run(story())


def test_a_step_that_raises_gets_its_own_error_and_the_others_go_on() -> None:
    def refuse(state: Marks) -> None:
        raise InvalidRequest("not this one")

    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        answers = await asyncio.gather(
            cas.change(add("a")), cas.change(refuse), cas.change(add("b")), return_exceptions=True
        )
        assert answers[0] == 0
        assert isinstance(answers[1], InvalidRequest)
        assert answers[2] == 1
        assert await stage.landed() == ["a", "b"]

    run(story())


def test_a_caller_that_left_before_its_pass_changes_nothing() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        await cas.change(add("one"))
        first = asyncio.ensure_future(cas.change(add("two")))
        await asyncio.sleep(0)
        left = asyncio.ensure_future(cas.change(add("gone")))
        await asyncio.sleep(0)
        left.cancel()
        await first
        await cas.change(add("three"))
        assert await stage.landed() == ["one", "two", "three"]

    run(story())


def test_a_closed_object_answers_what_it_has_and_takes_nothing_more() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        answer = asyncio.ensure_future(cas.change(add("mark")))
        await asyncio.sleep(0)
        await cas.close()
        assert await answer == 0
        with pytest.raises(BackendUnavailable, match="closed"):
            await cas.change(add("late"))

    run(story())


def test_every_pass_runs_its_hook_before_the_steps() -> None:
    async def story() -> None:
        stage = Stage()
        runs = []
        cas = CasObject(stage.blobs, NAME, Marks, every_pass=lambda state: runs.append(len(state.marks)))
        await cas.change(add("a"))
        await cas.change(all_marks)
        assert runs == [0, 1]

    run(story())


def test_news_are_told_for_own_writes_and_for_those_of_others() -> None:
    async def story() -> None:
        stage = Stage()
        news: list[list[str]] = []
        cas = CasObject(stage.blobs, NAME, Marks, on_news=lambda state: news.append(list(state.marks)))
        await cas.change(add("mine"))
        await marks_object(stage.blobs).change(add("theirs"))
        assert news[-1] == ["mine"]
        await cas.refresh()
        assert news[-1] == ["mine", "theirs"]
        told = len(news)
        await cas.refresh()
        assert len(news) == told, "nothing new"

    run(story())


# -- several writers --------------------------------------------------------------------------------------


def test_a_conflict_runs_the_steps_again_on_what_is_there() -> None:
    async def story() -> None:
        stage = Stage()
        one, other = marks_object(stage.blobs), marks_object(stage.blobs)
        assert await one.change(add("a")) == 0
        assert await other.change(add("b")) == 1
        assert await one.change(add("c")) == 2
        assert await stage.landed() == ["a", "b", "c"]

    run(story())


def test_an_answer_without_a_write_is_never_older_than_its_question() -> None:
    async def story() -> None:
        stage = Stage()
        one, other = marks_object(stage.blobs), marks_object(stage.blobs)
        await one.change(add("a"))
        await other.change(add("b"))
        assert await one.change(all_marks) == ["a", "b"]
        await other.change(add("c"))
        assert await one.look(all_marks) == ["a", "b", "c"]

    run(story())


def test_many_objects_on_one_object_lose_nothing() -> None:
    async def story() -> None:
        stage = Stage()
        crew = [marks_object(stage.blobs) for _ in range(8)]

        async def work(number: int) -> None:
            for step in range(20):
                await crew[number].change(add(f"{number}.{step}"))

        await asyncio.gather(*(work(number) for number in range(8)))
        marks = await stage.landed()
        assert len(marks) == len(set(marks)) == 160

    run(story())


# -- writes without a certain answer ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("is_new", [True, False], ids=["created", "replaced"])
def test_whatever_becomes_of_a_write_its_change_is_made_once(fault: Fault, is_new: bool) -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        before = [] if is_new else ["before"]
        if not is_new:
            await cas.change(add("before"))
        stage.weather.next_write(fault)
        assert await cas.change(add("mark")) == len(before)
        await stage.weather.land()
        assert await stage.landed() == [*before, "mark"]
        assert await cas.change(add("after")) == len(before) + 1
        assert await stage.landed() == [*before, "mark", "after"]

    run(story())


def test_a_late_write_that_lands_before_the_second_try_is_recognised() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        await cas.change(add("before"))
        stage.weather.next_write(Fault.LATE)
        reads = stage.weather.reads
        answer = asyncio.ensure_future(cas.change(add("mark")))
        await until(lambda: stage.weather.reads > reads)
        # The look has been answered by now, or is about to be: before it or after it, the write lands once.
        await stage.weather.land()
        assert await answer == 1
        assert await stage.landed() == ["before", "mark"]

    run(story())


def test_a_late_write_is_recognised_even_after_a_second_try_has_failed_too() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        await cas.change(add("before"))
        stage.weather.next_write(Fault.LATE, Fault.LOST_BEFORE)
        writes = stage.weather.writes
        answer = asyncio.ensure_future(cas.change(add("mark")))
        await until(lambda: stage.weather.writes == writes + 2)
        await stage.weather.land()
        assert await answer == 1
        assert await stage.landed() == ["before", "mark"]

    run(story())


def test_our_own_success_is_told_from_a_refusal_after_others_have_written_too() -> None:
    async def story() -> None:
        stage = Stage()
        cas, other = marks_object(stage.blobs), marks_object(stage.held)
        await cas.change(add("before"))
        stage.weather.next_write(Fault.REFUSED_AFTER)
        answer = asyncio.ensure_future(cas.change(add("mark")))
        await until(lambda: stage.serial == 2)
        for number in range(10):
            await other.change(add(f"other {number}"))
        assert await answer == 1
        assert (await stage.landed()).count("mark") == 1

    run(story())


def test_a_write_that_so_many_followed_that_nobody_can_tell_is_not_guessed_about() -> None:
    async def story() -> None:
        stage = Stage()
        cas, other = marks_object(stage.blobs), marks_object(stage.held)
        await cas.change(add("before"))
        stage.weather.next_write(Fault.REFUSED_AFTER)
        answer = asyncio.ensure_future(cas.change(add("mark")))
        await until(lambda: stage.serial == 2)
        # All in one turn of the loop, before the handle gets to read.
        read = stage.held.read

        async def read_much_later(name: str, *rest: Any) -> Blob | None:
            stage.held.read = read  # type: ignore[method-assign]
            for number in range(64):
                await other.change(add(f"other {number}"))
            return await read(name, *rest)

        stage.held.read = read_much_later  # type: ignore[method-assign]
        with pytest.raises(BackendUnavailable, match="repeating it is safe"):
            await answer
        assert (await stage.landed()).count("mark") == 1

    run(story())


def test_a_store_that_never_confirms_a_write_is_given_up_in_time() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs, give_up_after=10.0)
        stage.weather.next_write(*[Fault.LOST_BEFORE] * 1000)
        began = asyncio.get_running_loop().time()
        with pytest.raises(BackendUnavailable, match="repeating it is safe"):
            await cas.change(add("mark"))
        assert 10.0 <= asyncio.get_running_loop().time() - began < 12.0
        stage.weather.clear_up()
        assert await cas.change(add("after")) == 0

    run(story())


def test_an_older_content_is_not_believed_once_a_newer_one_was_seen() -> None:
    async def story() -> None:
        stage = Stage()
        cas, other = marks_object(stage.blobs), marks_object(stage.held)
        await cas.change(add("a"))
        old = stage.held.objects[NAME]
        await cas.change(add("b"))
        await other.change(add("c"))
        read = stage.held.read
        stale = [old, old]

        async def read_stale(name: str, *rest: Any) -> Blob | None:
            return stale.pop() if stale else await read(name, *rest)

        stage.held.read = read_stale  # type: ignore[method-assign]
        assert await cas.change(add("d")) == 3
        assert await cas.look(all_marks) == ["a", "b", "c", "d"]

    run(story())


def test_an_object_that_was_removed_is_made_again() -> None:
    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        await cas.change(add("a"))
        await stage.held.delete([NAME])
        assert await cas.change(add("b")) == 0
        assert await stage.landed() == ["b"]

    run(story())


# -- leading ----------------------------------------------------------------------------------------------


def test_a_leader_reads_nothing_while_its_term_is_valid() -> None:
    async def story() -> None:
        stage = Stage()
        await raise_epochs(stage.held, [NAME], FixedTerm(1))
        term = FixedTerm(1)
        cas = marks_object(stage.blobs, term=term)
        await cas.change(add("a"))
        reads = stage.weather.reads
        for _ in range(5):
            assert await cas.look(all_marks) == ["a"]
            assert await cas.change(all_marks) == ["a"]
        assert stage.weather.reads == reads
        term.valid = False
        assert await cas.look(all_marks) == ["a"]
        assert stage.weather.reads == reads + 1, "without a valid term it looks first"

    run(story())


def test_a_leader_that_finds_a_newer_epoch_never_writes_again() -> None:
    async def story() -> None:
        stage = Stage()
        await raise_epochs(stage.held, [NAME], FixedTerm(1))
        old = marks_object(stage.blobs, term=FixedTerm(1))
        await old.change(add("a"))
        await raise_epochs(stage.held, [NAME], FixedTerm(2))
        new = marks_object(stage.blobs, term=FixedTerm(2))
        assert await new.change(add("b")) == 1
        answers = await asyncio.gather(
            *(old.change(add(f"late {n}")) for n in range(3)), return_exceptions=True
        )
        assert all(isinstance(answer, Deposed) for answer in answers)
        writes = stage.weather.writes
        for _ in range(3):
            with pytest.raises(Deposed):
                await old.change(add("later"))
            with pytest.raises(Deposed):
                await old.look(all_marks)
        assert stage.weather.writes == writes
        assert await stage.landed() == ["a", "b"]
        assert stage.epoch == 2

    run(story())


def test_a_deposed_leader_still_answers_for_the_write_that_had_landed() -> None:
    async def story() -> None:
        stage = Stage()
        await raise_epochs(stage.held, [NAME], FixedTerm(1))
        old = marks_object(stage.blobs, term=FixedTerm(1))
        await old.change(add("a"))
        stage.weather.next_write(Fault.LOST_AFTER)
        serial = stage.serial
        answer = asyncio.ensure_future(old.change(add("b")))
        await until(lambda: stage.serial > serial)
        await raise_epochs(stage.held, [NAME], FixedTerm(2))
        assert await answer == 1
        with pytest.raises(Deposed):
            await old.change(add("c"))
        assert await stage.landed() == ["a", "b"]

    run(story())


def test_a_leader_without_a_valid_term_answers_nothing_that_is_old() -> None:
    async def story() -> None:
        stage = Stage()
        await raise_epochs(stage.held, [NAME], FixedTerm(1))
        term = FixedTerm(1)
        old = marks_object(stage.blobs, term=term)
        await old.change(add("a"))
        await raise_epochs(stage.held, [NAME], FixedTerm(2))
        term.valid = False
        with pytest.raises(Deposed):
            await old.look(all_marks)

    run(story())


def test_writers_beside_a_leader_are_safe_and_seen_after_a_refresh() -> None:
    async def story() -> None:
        stage = Stage()
        await raise_epochs(stage.held, [NAME], FixedTerm(1))
        leader, direct = marks_object(stage.blobs, term=FixedTerm(1)), marks_object(stage.blobs)
        await leader.change(add("a"))
        await direct.change(add("b"))
        assert stage.epoch == 1, "a direct writer leaves the epoch as it is"
        await leader.refresh()
        assert await leader.look(all_marks) == ["a", "b"]
        await direct.change(add("c"))
        assert await leader.change(add("d")) == 3

    run(story())


def test_an_object_that_leads_again_starts_from_what_is_there() -> None:
    async def story() -> None:
        stage = Stage()
        await raise_epochs(stage.held, [NAME], FixedTerm(1))
        cas = marks_object(stage.blobs, term=FixedTerm(1))
        await cas.change(add("a"))
        await raise_epochs(stage.held, [NAME], FixedTerm(2))
        await marks_object(stage.blobs, term=FixedTerm(2)).change(add("b"))
        with pytest.raises(Deposed):
            await cas.change(add("no"))
        await raise_epochs(stage.held, [NAME], FixedTerm(3))
        cas.lead(FixedTerm(3))
        assert await cas.change(add("c")) == 2
        cas.lead(None)
        assert await cas.look(all_marks) == ["a", "b", "c"]

    run(story())


def test_an_object_without_our_epoch_is_compared_before_it_is_believed() -> None:
    async def story() -> None:
        stage = Stage()
        direct = marks_object(stage.blobs)
        await direct.change(add("a"))
        leader = marks_object(stage.blobs, term=FixedTerm(1))
        assert await leader.look(all_marks) == ["a"]
        await direct.change(add("b"))
        assert await leader.look(all_marks) == ["a", "b"]
        await leader.change(add("c"))
        assert stage.epoch == 1

    run(story())


@pytest.mark.parametrize("fault", list(Fault))
def test_raising_an_epoch_survives_every_fault_and_keeps_the_state(fault: Fault) -> None:
    async def story() -> None:
        stage = Stage()
        await marks_object(stage.blobs).change(add("a"))
        stage.weather.next_write(fault)
        names = [NAME, *(f"queues/q{number}/0/state" for number in range(40))]
        await raise_epochs(stage.blobs, names, FixedTerm(7))
        await stage.weather.land()
        assert {unseal(blob.data, "")[0].epoch for blob in stage.held.objects.values()} == {7}
        assert sorted(stage.held.objects) == sorted(names)
        assert await stage.landed() == ["a"]
        with pytest.raises(ExceptionGroup):
            await raise_epochs(stage.blobs, names, FixedTerm(6))
        assert stage.epoch == 7, "never back"

    run(story())


# -- what is in the object --------------------------------------------------------------------------------


def test_a_foreign_object_is_refused_and_left_alone() -> None:
    async def story() -> None:
        stage = Stage()
        await stage.held.put(NAME, b"somebody's holiday pictures")
        with pytest.raises(BackendUnavailable, match="is damaged, or not what TaskHarbor has written"):
            await marks_object(stage.blobs).change(add("a"))
        assert stage.held.objects[NAME].data == b"somebody's holiday pictures"

    run(story())


def test_a_state_that_grows_large_is_warned_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cas_module, "WARN_BYTES", 100)

    async def story() -> None:
        stage = Stage()
        cas = marks_object(stage.blobs)
        with caplog.at_level(logging.WARNING):
            for number in range(10):
                await cas.change(add(f"{number}" * 20))
        assert cas.size > 200

    run(story())
    assert sum("shards" in record.message for record in caplog.records) == 1


async def test_a_large_state_is_compressed_on_its_way_to_a_remote_store() -> None:
    held = HeldBlobs()
    held.is_remote = True
    cas = marks_object(held)
    await cas.change(add("x" * 1_000_000))
    assert len(held.objects[NAME].data) < 20_000
    assert await marks_object(held).look(all_marks) == ["x" * 1_000_000]
