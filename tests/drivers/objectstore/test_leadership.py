"""The root object: one store, its queues, and the names of their objects. And leadership, which is noted there: one leader at a
time, by no clock but its own, and a leader that was away too long is refused everywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.objectstore.fake_blobs import FAULTS, STORM, Fault, FaultyBlobs, HeldBlobs, Weather
from drivers.objectstore.marks import LedStore, VirtualLoop, add, all_marks, in_virtual_time, marks_object
from taskharbor.drivers.objectstore import blobs as backoff
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import Deposed, unseal
from taskharbor.drivers.objectstore.catalog import Catalog, escaped, log_folder, state_name
from taskharbor.drivers.objectstore.leadership import Leadership
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import SECOND

TERM = 12.0


class Broker(Leadership):
    """A candidate whose clock is moved by hand, and has nothing to do with any other."""

    def __init__(self, blobs: Blobs, name: str = "one", *, start: float = 0.0) -> None:
        self.clock = start
        self.led = LedStore(blobs)
        clock = lambda: round(self.clock * SECOND)  # noqa: E731
        super().__init__(self.led, url=f"http://{name}", term=TERM, monotonic=clock)  # type: ignore[arg-type]

    async def step(self, seconds: float = 0.0) -> None:
        self.clock += seconds
        await self.take_step()

    def is_leading(self) -> bool:
        return self.is_leader


async def pair(blobs: Blobs) -> tuple[Broker, Broker]:
    """A leader, and one that stands by."""
    one, other = Broker(blobs, start=1e6), Broker(blobs, "other", start=3.0)
    await one.step()
    await other.step()
    assert (one.is_leading(), other.is_leading()) == (True, False)
    return one, other


async def test_the_first_leads_and_stays_while_it_renews_and_the_second_knows_where_it_is() -> None:
    held = HeldBlobs()
    one, other = await pair(held)
    assert one.leader_url == other.leader_url == "http://one"
    assert one.epoch == 1
    await one.leads.wait()
    await (await Catalog(held).open()).add_queues(["by hand"])
    for _ in range(20):
        await one.step(TERM / 3)
        await other.step(TERM / 3)
        assert (one.is_leading(), other.is_leading()) == (True, False)
    assert await one.led.catalog.queues() == ["by hand"], "it hears of queues that others added"


async def test_a_leader_silent_for_a_term_is_followed_and_cannot_write_whatever_it_believes() -> None:
    held = HeldBlobs()
    one, other = await pair(held)
    cas, empty = await one.led.object("mail"), await one.led.object("empty")
    assert await cas.change(add("by one")) == 0

    await other.step(TERM)
    assert not other.is_leading(), "a little more than a term, for clocks that run differently"
    assert state_name("empty", 0) not in held.objects
    await other.step(TERM / 10)
    assert other.is_leading()
    assert other.epoch == 2
    header, body = unseal(held.objects[state_name("empty", 0)].data, "")
    assert (header.epoch, body) == (2, b""), "a queue without an object yet is signed too"
    assert await (await other.led.object("mail")).change(add("by other")) == 1

    assert one.is_leading(), "its clock stood still, with the whole machine"
    for late in (cas.change(add("late")), empty.change(add("late")), one.led.object("a new queue")):
        with pytest.raises(Deposed):
            await late
    one.clock += TERM
    assert not one.is_leading(), "it stops by its own clock before anybody else may begin"
    await one.step()
    assert one.epoch is None
    await one.step()
    assert one.leader_url == "http://other"
    with pytest.raises(Deposed):
        await cas.look(all_marks)
    assert await (await other.led.object("mail")).look(all_marks) == ["by one", "by other"]


async def test_a_renewal_in_the_last_moment_keeps_the_leader_in_office() -> None:
    one, other = await pair(HeldBlobs())
    other.clock += TERM * 1.1
    read = other._catalog.leading

    async def read_then_renew() -> Any:
        seen = await read()
        await one.step()
        return seen

    other._catalog.leading = read_then_renew  # type: ignore[method-assign]
    await other.take_step()
    assert (one.is_leading(), other.is_leading()) == (True, False)
    await one.step()
    assert one.is_leading()


@pytest.mark.parametrize("fault", FAULTS)
async def test_taking_and_renewing_survive_every_fault(fault: Fault) -> None:
    weather = Weather()
    broker = Broker(FaultyBlobs(HeldBlobs(), weather))
    await (await broker.led.catalog.open()).add_queues(["mail"])
    for _ in range(3):
        weather.next_write(fault)
        await broker.step(TERM / 3)
        await weather.land()
        assert broker.is_leading()
    assert broker.epoch == 1


async def test_a_candidate_that_took_it_without_hearing_so_takes_it_again_at_once() -> None:
    weather = Weather()
    blobs = FaultyBlobs(HeldBlobs(), weather)
    broker = Broker(blobs)
    await broker._catalog.open()
    weather.next_write(Fault.LOST_AFTER, *[Fault.LOST_BEFORE] * 5)
    weather.writes = 0
    read = blobs.read

    async def unreadable(name: str, *rest: Any) -> Any:
        if weather.writes:
            raise BackendUnavailable("gone")
        return await read(name, *rest)

    blobs.read = unreadable  # type: ignore[method-assign,assignment]
    await broker.step()
    assert not broker.is_leading()
    blobs.read = read  # type: ignore[method-assign]
    weather.clear_up()
    await broker.step()
    assert broker.is_leading()
    assert broker.epoch == 2


@in_virtual_time
async def test_a_store_that_is_away_ends_the_term_until_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    weather = Weather()
    broker = Broker(FaultyBlobs(HeldBlobs(), weather))
    await broker.step()
    assert broker.is_leading()
    weather.next_write(*[Fault.LOST_BEFORE] * 10_000)
    for _ in range(4):
        await broker.step(TERM / 3)
    assert not broker.is_leading()
    weather.clear_up()
    await broker.step()
    assert broker.is_leading()
    assert broker.epoch == 1
    assert sum("nobody can lead for now" in record.message for record in caplog.records) == 1


@in_virtual_time
async def test_a_damaged_object_that_delays_leading_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    held = HeldBlobs()
    held.keep(state_name("damaged", 0), b"somebody's holiday pictures")
    broker = Broker(held)
    await (await broker.led.catalog.open()).add_queues(["sound", "damaged"])
    await broker.step()
    await asyncio.sleep(TERM)
    assert not broker.leads.is_set()
    await held.delete([state_name("damaged", 0)])
    await broker.leads.wait()
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot lead yet" in told
    assert "queues/damaged/0/state" in told


# -- all of it at once ------------------------------------------------------------------------------------


class Machine(Leadership):
    """A broker on a machine of its own, which may stand still at any moment while its clock and the world go on."""

    def __init__(self, blobs: Blobs, name: str, chance: random.Random) -> None:
        offset = chance.random() * 1e6
        self.loop = asyncio.get_running_loop()
        self.chance = chance
        self.frozen_until = 0.0
        self.answered: list[str] = []
        self.led = LedStore(blobs)
        clock = lambda: round((self.loop.time() + offset) * SECOND)  # noqa: E731
        super().__init__(self.led, url=f"http://{name}", term=3.0, monotonic=clock)  # type: ignore[arg-type]

    async def _rest(self) -> None:
        await super()._rest()
        await self.thaw()

    async def thaw(self) -> None:
        while (left := self.frozen_until - self.loop.time()) > 0:  # noqa: ASYNC110 - it is time that is waited for
            await asyncio.sleep(left)

    async def serve(self, marks: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(self.chance.random() * 0.2)
            await self.thaw()
            if self.is_leader:
                mark = marks()
                try:
                    cas = await self.led.object(self.chance.choice(["a", "b"]))
                    await self.thaw()
                    await cas.change(add(mark))
                except Deposed:
                    self.look_now()
                except BackendUnavailable:
                    pass
                else:
                    self.answered.append(mark)


@pytest.mark.parametrize("weather", [Weather, lambda chance: Weather(chance, STORM)], ids=["calm", "storm"])
def test_brokers_that_freeze_never_lead_together(weather: Callable[[random.Random], Weather]) -> None:
    # A story in which nobody had to take over shows nothing, and is told about once in four hundred times.
    for _ in range(5):
        seed = random.SystemRandom().randrange(2**32)
        print(f"seed {seed}")
        backoff._random.seed(seed)
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            if runner.run(freeze_and_wake(seed, weather(random.Random(seed)))):
                return
    raise AssertionError("five times nobody took over, or hardly anything was done")


async def freeze_and_wake(seed: int, weather: Weather) -> bool:
    """True if it shows anything."""
    chance = weather.random
    held = HeldBlobs()
    numbers = iter(range(1_000_000))
    loop = asyncio.get_running_loop()
    machines = [Machine(FaultyBlobs(held, weather), f"m{number}", chance) for number in range(3)]
    direct = await Catalog(held).open()
    leaders: set[int] = set()
    tasks = [asyncio.ensure_future(machine.run()) for machine in machines]
    tasks += [asyncio.ensure_future(machine.serve(lambda: f"x{next(numbers)}")) for machine in machines]
    while loop.time() < 120.0:
        await asyncio.sleep(0.05)
        now_leading = [number for number, machine in enumerate(machines) if machine.is_leader]
        assert len(now_leading) <= 1, f"seed {seed}: {now_leading} lead together at {loop.time():g}"
        leaders.update(now_leading)
        if chance.random() < 0.01:
            chance.choice(machines).frozen_until = loop.time() + chance.random() * 10
        if chance.random() < 0.05:
            await weather.land()
    weather.clear_up()
    for machine in machines:
        machine.frozen_until = 0.0
    await asyncio.sleep(20)
    assert sum(machine.is_leader for machine in machines) == 1, f"seed {seed}: nobody leads"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for machine in machines:
        await machine.resign()
    landed: list[str] = []
    for queue in await direct.queues():
        landed += await marks_object(held, name=state_name(queue, 0)).look(all_marks)
    answered = [mark for machine in machines for mark in machine.answered]
    assert len(landed) == len(set(landed)), f"seed {seed}: doubled"
    assert set(answered) <= set(landed), f"seed {seed}: lost"
    return len(leaders) > 1 and len(answered) > 100


# -- the catalog ------------------------------------------------------------------------------------------


ALLOWED = set("abcdefghijklmnopqrstuvwxyz0123456789_-=.")


async def test_the_first_to_open_makes_the_store_and_the_others_find_it() -> None:
    blobs = HeldBlobs()
    catalogs = [Catalog(blobs) for _ in range(5)]
    await asyncio.gather(*(catalog.open() for catalog in catalogs))
    assert len({catalog.store_id for catalog in catalogs}) == 1
    assert {catalog.shards for catalog in catalogs} == {1}
    assert "" != (await Catalog(HeldBlobs()).open()).store_id != catalogs[0].store_id
    one, other, *_ = catalogs
    await one.add_queues(["mail", "print", "mail"])
    await other.add_queues(["print", "scan"])
    assert await one.queues() == await other.queues() == ["mail", "print", "scan"]


async def test_the_number_of_shards_is_fixed_when_the_store_is_made() -> None:
    blobs = HeldBlobs()
    for shards in (4, None, 4):
        assert (await Catalog(blobs, shards=shards).open()).shards == 4
    with pytest.raises(InvalidRequest, match="write shards=4 or leave the option out"):
        await Catalog(blobs, shards=2).open()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_store_is_made_and_a_queue_added_whatever_becomes_of_the_writes(fault: Fault) -> None:
    weather = Weather()
    held = HeldBlobs()
    weather.next_write(fault)
    catalog = await Catalog(FaultyBlobs(held, weather)).open()
    weather.next_write(fault)
    await catalog.add_queues(["mail"])
    await weather.land()
    other = await Catalog(held).open()
    assert (other.store_id, await other.queues()) == (catalog.store_id, ["mail"])


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=5, unique=True))
def test_every_queue_has_a_folder_of_its_own_that_every_store_allows(queues: list[str]) -> None:
    queues = [queue for queue in queues if not any("\ud800" <= letter <= "\udfff" for letter in queue)]
    folders = [escaped(queue) for queue in queues]
    assert len({folder.lower() for folder in folders}) == len(queues)
    for queue, folder in zip(queues, folders, strict=True):
        assert set(folder) <= ALLOWED
        assert len(folder) <= 120
        assert not folder.startswith(".")
        if len(queue.encode()) <= 40:
            assert unquote_to_bytes(folder.replace("=", "%")).decode() == queue


@pytest.mark.parametrize(
    ("queue", "folder"),
    [
        *(("mail", "mail"), ("Mail", "=4dail"), ("a/b", "a=2fb")),
        *(("..", "=2e=2e"), ("a=b", "a=3db"), ("ü", "=c3=bc")),
    ],
)
def test_the_spelling_of_a_folder_never_changes(queue: str, folder: str) -> None:
    assert escaped(queue) == folder
    assert state_name(queue, 3) == f"queues/{folder}/3/state"
    assert log_folder(queue, 0) == f"queues/{folder}/0/log"
