"""The operator of a virtual day: draws schedules, and does to them whatever a person may do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from schedules.expected import BURSTS, DAY, FAR, RULES, SECOND, ZONES, Change, Version, instants
from schedules.virtual import JOBS, Process, World, ask
from taskharbor import AsyncClient, BackendUnavailable, Schedule, ScheduleNotFound
from taskharbor.jobs import to_datetime

OVERLAPS = ("allow", "allow", "allow", "skip", "queue_one", "replace")
VERBS = ("put", "put", "put", "again", "pause", "resume", "trigger", "delete")


class VirtualClient(AsyncClient):
    """A client without an event loop: there is nothing to open."""

    async def _ready(self) -> None: ...


class Operator:
    """Puts, changes, pauses, triggers and deletes schedules, and repeats what got no answer."""

    def __init__(self, world: World) -> None:
        self._world, self._chance = world, world.chance
        self._process = Process(world, "operator", is_worker=False)
        self._schedules = VirtualClient(self._process.driver, clock=self._process.clock).schedules
        self._versions = self.changes = 0
        self._todo: list[tuple[str, str]] = []
        self._is_busy = False
        self._put: dict[str, tuple[Schedule, Version]] = {}
        self._names = ["a", "b", "c", "d"][: self._chance.randint(1, 4)]

    def begin(self) -> None:
        """Put all, then do something now and then until the end."""
        for name in self._names:
            self._push("put", name)
        self._world.after(self._chance.expovariate(1 / 9000), self._choose)

    def declare(self) -> None:
        """What the start of an app does: put all that is there once more, unchanged."""
        for name in self._names:
            self._push("again", name)

    def _choose(self) -> None:
        if not self._world.is_healed:
            self._push(self._chance.choice(VERBS), self._chance.choice(self._names))
            self._world.after(self._chance.expovariate(1 / 9000), self._choose)

    def _push(self, verb: str, name: str) -> None:
        self._todo.append((verb, name))
        if not self._is_busy:
            self._is_busy = True
            self._process.start(self._work())

    async def _work(self) -> None:
        while self._todo:
            await self._do(*self._todo.pop(0))
        self._is_busy = False

    async def _do(self, verb: str, name: str) -> None:
        track = self._world.judge.current(name)
        if verb == "put":
            self._put[name] = self._draw(name)
        elif track is None or (verb == "resume" and not track.will_rest):
            return
        elif track.will_rest and verb != "again" and self._chance.random() < 0.7:
            verb = "resume"
        while True:
            try:
                await self._process.clock.refresh()
                await self._try(verb, name)
                return
            except ScheduleNotFound:
                return
            except BackendUnavailable:
                await ask(1.0)

    async def _try(self, verb: str, name: str) -> None:
        schedules, world = self._schedules, self._world
        schedule, version = self._put[name]
        world.change = Change("put" if verb == "again" else verb, version, 0)
        if verb in ("put", "again"):
            before = self.changes
            await schedules.put(schedule)
            if verb == "again" and self.changes > before:
                world.judge.wrong.append(f"{name}: an unchanged declaration changes something")
        elif verb == "pause":
            await schedules.pause(name, "why")
        else:
            await getattr(schedules, verb)(name)

    def _draw(self, name: str) -> tuple[Schedule, Version]:
        chance, world = self._chance, self._world
        self._versions += 1
        rule, zone, now = chance.choice(RULES), chance.choice(ZONES), world.now()
        low, high, fields = 0, FAR, dict[str, Any]()
        if chance.random() < 0.3:
            rule = chance.choice(BURSTS)
            low = now + chance.randrange(6 * 3600) * SECOND
            high = low + rule.every * chance.randint(5, 60) * SECOND
        elif chance.random() < 0.2:
            low, high = now + chance.randrange(DAY // 2), now + chance.randrange(DAY // 2, DAY)
        if low:
            fields["start"], fields["end"] = to_datetime(low), to_datetime(high)
        overlap: Any = chance.choice(OVERLAPS)
        catch_up = chance.choice((None, None, 0, 600, 14_400, 108_000))
        mode: Any = chance.choice(("each", "each", "last"))
        jitter = chance.choice((0, 0, 30))
        if rule.every:
            fields["every"], fields["offset"] = timedelta(seconds=rule.every), rule.offset
        else:
            fields["cron"], fields["zone"] = rule.cron, zone
        schedule = Schedule(
            name=name,
            job="work",
            queue=JOBS,
            payload={"v": self._versions},
            overlap=overlap,
            catch_up=catch_up,
            catch_up_mode=mode,
            jitter=jitter,
            pause_on_failure=chance.random() < 0.3,
            **fields,
        )
        window = None if catch_up is None else catch_up * SECOND
        found = instants(rule, zone, world.midnight)
        return schedule, Version(self._versions, found, low, high, overlap, window, mode, jitter * SECOND)
