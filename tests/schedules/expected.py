"""What schedules must do, by brute force and without the product's code: the instants of rules, and a judge of all calls.

The judge sees every call that takes effect. It keeps a model of each schedule (its rule, its first open instant, what changed
meanwhile) and says what is wrong: a tick that is doubled, lost, late or not due, an overlap, a specification that is out of date.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

SECOND = 1_000_000
DAY = 86_400 * SECOND
FAR = 2**62
MOST = 100
GRACE = 60 * SECOND
# Latency and the errors of clocks.
PATIENCE = 3 * SECOND


class Rule(NamedTuple):
    """An interval, or an expression together with the fields it stands for."""

    every: int = 0
    offset: int = 0
    cron: str = ""
    seconds: tuple[int, ...] = (0,)
    minutes: frozenset[int] = frozenset()
    hours: frozenset[int] = frozenset()
    weekdays: frozenset[int] = frozenset(range(7))
    is_fixed: bool = False


def _fields(cron: str, minutes: Iterable[int], hours: Iterable[int], **more: Any) -> Rule:
    return Rule(cron=cron, minutes=frozenset(minutes), hours=frozenset(hours), **more)


RULES = (
    Rule(every=600),
    Rule(every=1800),
    Rule(every=3600, offset=600),
    Rule(every=2820),
    Rule(every=21_600),
    _fields("30 2 * * *", [30], [2], is_fixed=True),
    _fields("0,15 0-3 * * *", [0, 15], range(4), is_fixed=True),
    _fields("59 23 * * *", [59], [23], is_fixed=True),
    _fields("10 30 2,14 * * *", [30], [2, 14], seconds=(10,), is_fixed=True),
    _fields("5 1-9 * * MON-FRI", [5], range(1, 10), weekdays=frozenset(range(5)), is_fixed=True),
    _fields("*/30 * * * *", [0, 30], range(24)),
    _fields("20 */2 * * *", [20], range(0, 24, 2)),
    _fields("*/20 0-3 * * *", [0, 20, 40], range(4)),
    _fields("7 * * * *", [7], range(24)),
    _fields("*/10 6-20 * * *", range(0, 60, 10), range(6, 21)),
)
# For a few minutes only.
BURSTS = (Rule(every=1), Rule(every=7), Rule(every=20, offset=3))
ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Antarctica/Troll",
    "Africa/Casablanca",
)
# Midnights in UTC. In the day after most of them, the clocks of some of these zones are changed.
MIDNIGHTS = (
    datetime(2026, 3, 8, tzinfo=UTC),
    datetime(2026, 3, 29, tzinfo=UTC),
    datetime(2026, 4, 4, tzinfo=UTC),
    datetime(2026, 6, 17, tzinfo=UTC),
    datetime(2026, 10, 3, tzinfo=UTC),
    datetime(2026, 10, 25, tzinfo=UTC),
    datetime(2026, 11, 1, tzinfo=UTC),
)


@lru_cache(64)
def _minutes(zone: str, midnight: datetime) -> list[tuple[int, datetime]]:
    """All minutes of six days, with the time on the wall."""
    tz, first = ZoneInfo(zone), midnight - timedelta(days=2)
    every = [first + timedelta(minutes=n) for n in range(6 * 1440)]
    return [(round(at.timestamp()) * SECOND, at.astimezone(tz).replace(tzinfo=None, fold=0)) for at in every]


@lru_cache(1024)
def instants(rule: Rule, zone: str, midnight: datetime) -> Sequence[int]:
    """All instants of a rule in the days around a midnight."""
    low, high = (round((midnight + timedelta(days=n)).timestamp()) for n in (-2, 4))
    if rule.every:
        aligned = low // rule.every * rule.every + rule.offset
        return range(aligned * SECOND, high * SECOND, rule.every * SECOND)
    found: set[int] = set()
    seen: set[datetime] = set()
    last: datetime | None = None
    for instant, wall in _minutes(zone, midnight):
        skipped = last + timedelta(minutes=1) if last is not None else wall
        # The end of a gap stands for all that it skips.
        while rule.is_fixed and skipped < wall:
            if _matches(rule, skipped):
                found.add(instant)
            skipped += timedelta(minutes=1)
        if _matches(rule, wall) and not (rule.is_fixed and wall in seen):
            found.update(instant + second * SECOND for second in rule.seconds)
        seen.add(wall)
        last = wall
    return sorted(found)


def _matches(rule: Rule, wall: datetime) -> bool:
    return wall.minute in rule.minutes and wall.hour in rule.hours and wall.weekday() in rule.weekdays


class Version(NamedTuple):
    """A specification, as far as ticks depend on it."""

    number: int
    instants: Sequence[int]
    low: int
    high: int
    overlap: str
    catch_up: int | None
    mode: str
    jitter: int

    def first(self, since: int) -> int:
        """The first tick that is not earlier; FAR if there is none."""
        place = bisect_left(self.instants, max(since, self.low))
        found = self.instants[place] if place < len(self.instants) else FAR
        return found if found <= self.high else FAR

    def due(self, cursor: int, now: int) -> list[int]:
        """The ticks that must be made now."""
        window = self.catch_up
        if window is None:
            place = bisect_right(self.instants, now)
            window = self.instants[place] - self.instants[place - 1]
        low = max(cursor, now - max(window, GRACE) + 1, self.low)
        first, last = bisect_left(self.instants, low), bisect_right(self.instants, min(now, self.high))
        return list(self.instants[first:last][-MOST:])


class Change(NamedTuple):
    """What an operator wants: put, pause or resume, and the instant that counts."""

    kind: str
    version: Version
    at: int


class Attempt(msgspec.Struct, eq=False):
    """One lease of a schedule."""

    track: Track
    version: Version
    now: int
    due: list[int]
    was_open: bool
    may_pause: bool
    made: int = 0
    is_over: bool = False


class Track(msgspec.Struct, eq=False):
    """The model of one schedule, from its first put to its deletion."""

    name: str
    job_id: str
    version: Version
    cursor: int
    changed_at: int
    is_paused: bool = False
    is_deleted: bool = False
    has_dead: bool = False
    attempt: Attempt | None = None
    pending: list[Change] = []
    made: dict[int, str] = {}
    """Ticks whose job was stored or merged, with the id of the job."""
    merged: dict[int, int] = {}
    """Those that were merged, with the version of the schedule."""

    def apply(self, change: Change) -> None:
        if change.kind == "put":
            if not self.is_paused:
                self.cursor = min(self.cursor, change.at)
        elif change.kind == "pause":
            self.is_paused, self.cursor = True, FAR
        elif self.is_paused:
            self.is_paused, self.cursor, self.has_dead = False, change.at, False
        self.version, self.changed_at = change.version, change.at

    @property
    def will_rest(self) -> bool:
        """Paused, or will be when the lease ends."""
        orders = [one.kind for one in self.pending if one.kind != "put"]
        return orders[-1] == "pause" if orders else self.is_paused

    def merge(self) -> None:
        for change in self.pending:
            self.apply(change)
        self.pending = []


class OpenJob(NamedTuple):
    """A job that has not ended."""

    id: str
    state: str
    cancel_requested: bool


class Judge:
    """Follows all calls and keeps what is wrong with them."""

    def __init__(self) -> None:
        self.tracks: dict[str, Track] = {}
        self.attempts: dict[tuple[str, str], Attempt] = {}
        self.wrong: list[str] = []
        self.counts = {"ticks": 0, "merged": 0, "skipped": 0, "repeated": 0, "caught up": 0, "changes": 0}
        self.trouble_until = 0
        self._of_worker: dict[tuple[str, str], Attempt] = {}

    def current(self, name: str) -> Track | None:
        """The schedule of this name that is not deleted."""
        return next((one for one in self.tracks.values() if one.name == name and not one.is_deleted), None)

    # -- changes by operators --------------------------------------------------------------------------------

    def put(self, job_id: str, name: str, change: Change) -> None:
        """The own job of a schedule was stored or changed."""
        self.counts["changes"] += 1
        track = self.current(name)
        if track is None:
            self.tracks[job_id] = Track(name, job_id, change.version, change.at, change.at)
        elif track.attempt is None:
            track.apply(change)
        else:
            track.pending.append(change)

    def delete(self, name: str) -> None:
        track = self.current(name)
        if track is not None:
            track.is_deleted = True

    # -- leases ----------------------------------------------------------------------------------------------

    def reserved(self, worker: str, job_id: str, token: str, payload: bytes, now: int, is_open: bool) -> None:
        track = self.tracks.get(job_id)
        if track is None or (track.is_deleted and track.attempt is not None):
            self.wrong.append(f"{worker} leased {job_id}, which is deleted or unknown")
            return
        track.merge()
        stored = json.loads(payload)
        seen = (stored["spec"]["payload"]["v"], "paused" in stored)
        if seen != (track.version.number, track.is_paused):
            self.wrong.append(f"{track.name}: {seen} is out of date: version {track.version.number}")
        due = [] if track.is_paused else track.version.due(track.cursor, now)
        attempt = Attempt(track, track.version, now, due, is_open, track.has_dead)
        track.attempt = self.attempts[job_id, token] = self._of_worker[worker, track.name] = attempt

    def settled(self, job_id: str, token: str) -> None:
        attempt = self.attempts.get((job_id, token))
        if attempt is None or attempt.is_over:
            return
        attempt.is_over, track = True, attempt.track
        track.attempt = None
        if not (attempt.may_pause or track.is_deleted):
            self._check_end(track, attempt)
        track.cursor = FAR if track.is_paused else attempt.version.first(attempt.now + 1)
        track.merge()

    def _check_end(self, track: Track, attempt: Attempt) -> None:
        due, version = attempt.due, attempt.version
        if not due:
            return
        self.counts["caught up"] += len(due) > 1
        needed = due
        if version.mode == "last" or version.overlap == "replace":
            needed = due[-1:]
        lost = [tick for tick in needed if tick not in track.made]
        if version.overlap == "skip":
            is_skipped = not any(tick in track.made for tick in due)
            self.counts["skipped"] += is_skipped
            lost = due if is_skipped and not attempt.was_open else []
        if lost:
            self.wrong.append(f"{track.name}: lost {lost}, looked at {attempt.now}")
        first = max(due[0], track.changed_at)
        if first > self.trouble_until and attempt.now - first > PATIENCE:
            self.wrong.append(f"{track.name}: {due[0]} is late, looked at {attempt.now}")

    # -- jobs ------------------------------------------------------------------------------------------------

    def ticked(
        self,
        worker: str,
        name: str,
        tick: int,
        delay: int,
        is_new: bool,
        target: OpenJob,
        others: Sequence[OpenJob],
    ) -> None:
        """A job of a tick was stored (new), was known, or was merged into the target. `others` have not ended, and were there."""
        attempt = self._of_worker.get((worker, name))
        if attempt is None or tick not in attempt.due:
            self.wrong.append(f"{name}: {tick} is not due, by {worker}")
            return
        track, version = attempt.track, attempt.version
        if not 0 <= delay <= version.jitter:
            self.wrong.append(f"{name}: {tick} is moved by {delay}")
        made = track.made
        if tick in made:
            self.counts["repeated"] += 1
            # Known limit: a tick was merged into a waiting job, the overlap was changed before the lease was over, and the
            # repeated try has no key by which the merge would be recognised.
            if is_new and track.merged.get(tick, version.number) == version.number:
                self.wrong.append(f"{name}: {tick} is doubled")
            return
        if made and tick < max(made):
            self.wrong.append(f"{name}: {tick} after {max(made)}")
        made[tick] = target.id
        if not is_new:
            track.merged[tick] = version.number
        attempt.made += 1
        self.counts["ticks" if is_new else "merged"] += 1
        if attempt.made > 1 and (version.mode == "last" or version.overlap in ("skip", "replace")):
            self.wrong.append(f"{name}: {tick} is the second of one step")
        beside = [*others] if is_new else [*others, target]
        if version.overlap == "skip" and any(one.id.startswith("tick:") for one in beside):
            self.wrong.append(f"{name}: {tick} beside {beside}")
        if version.overlap == "replace" and any(
            not one.cancel_requested and one.id.startswith("tick:")
            for one in others
            if one.state == "inflight"
        ):
            self.wrong.append(f"{name}: {tick} does not replace {others}")
        open_now = {one.id: one for one in (*others, target)}.values()
        if version.overlap != "allow" and sum(one.state != "inflight" for one in open_now) > 1:
            self.wrong.append(f"{name}: two wait: {open_now}")

    def ended(self, now: int) -> None:
        """All is healed and idle: nothing that was due is left."""
        for track in self.tracks.values():
            if track.is_deleted or track.will_rest or track.has_dead:
                continue
            left = track.version.first(track.cursor)
            if left <= now - PATIENCE or track.attempt is not None:
                self.wrong.append(f"{track.name}: {left} was never looked at")
