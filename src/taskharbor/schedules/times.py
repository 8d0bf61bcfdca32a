"""The instants of cron expressions and intervals, forwards and backwards.

An expression speaks of the clock on the wall of its zone. cronsim finds the wall times that match; this module maps them to
instants by Vixie's rules. With an hour and a minute that are given, a time that summer time skips becomes the end of the gap, and
a time that comes twice counts once, the first time. With a wildcard in one of them, each instant counts whose wall time matches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, TypeAlias
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from taskharbor.errors import InvalidRequest
from taskharbor.jobs import SECOND, Micros, to_datetime, to_micros

LONGEST_EXPRESSION = 200
_KEYWORDS = {
    **dict.fromkeys(("@yearly", "@annually"), "0 0 1 1 *"),
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    **dict.fromkeys(("@daily", "@midnight"), "0 0 * * *"),
    "@hourly": "0 * * * *",
}
_FIELDS = {
    "second": "0-59",
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31 or L, and a day that its months have",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7, SUN-SAT, 5L or MON#2",
}
_NAIVE = datetime(2000, 1, 1)
# Longer than the clocks of any zone are ever turned back.
_LONGEST_FOLD = timedelta(hours=4)
_ONE = timedelta(seconds=1)


@lru_cache(4096)
def zone_of(name: str) -> ZoneInfo:
    """Return a zone of the tz database. Raises InvalidRequest."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        known = "give a name of the tz database, as in Europe/Berlin; where the system has none, `pip install tzdata`"
        raise InvalidRequest(f"zone {name!r} is not known on this machine: {known}") from None


class Every:
    """Instants at one distance, counted from the epoch."""

    def __init__(self, every: Micros, offset: Micros) -> None:
        self._every = every
        self._offset = offset

    def following(self, instant: Micros) -> Micros:
        """Return the first one later than this."""
        return self.latest(instant) + self._every

    def latest(self, instant: Micros) -> Micros:
        """Return the last one that is not later than this."""
        return instant - (instant - self._offset) % self._every


class Cron:
    """The instants of one expression in one zone. Raises InvalidRequest for an expression that cannot be read."""

    def __init__(self, expression: str, zone: str) -> None:
        self._parsed = _parse(expression)
        self._zone = None if zone == "UTC" else zone_of(zone)
        minute, hour = self._parsed.parts[1:3]
        self._is_fixed = not (minute.startswith("*") or hour.startswith("*"))
        # Ticks are at the beginning of steps, so all instants of a step have one answer. Many schedules share an expression, and
        # ask about the same moment.
        self._step = 60 * SECOND if self._parsed.seconds == {0} else SECOND
        self._find = lru_cache(64)(self._search)

    def following(self, instant: Micros) -> Micros | None:
        """Return the first one later than this; None if there is none in the next 50 years."""
        return self._find(instant - instant % self._step, 1)

    def latest(self, instant: Micros) -> Micros | None:
        """Return the last one that is not later than this; None if there is none in the 50 years before."""
        return self._find(instant - instant % self._step, -1)

    def _search(self, instant: Micros, sign: Literal[1, -1]) -> Micros | None:
        at = to_datetime(instant)
        # If the clock is turned back nearby, wall times behind this one come again, or have been there before.
        turned = max(timedelta(), -self._turn(*sorted((at, at + sign * _LONGEST_FOLD))))
        best: datetime | None = None
        for wall in self._walls(self._wall(at) - sign * turned + (_ONE if sign < 0 else timedelta()), sign):
            found = self._instants(wall)[::sign]
            if best is not None and found and sign * (found[0] - best) >= timedelta():
                break
            nearer = [one for one in found if best is None or sign * (one - best) < timedelta()]
            best = next((one for one in nearer if (one > at) == (sign > 0)), best)
            if best is not None and not turned:
                break
        return None if best is None else to_micros(best)

    def _wall(self, at: datetime) -> datetime:
        return at.astimezone(self._zone or UTC).replace(tzinfo=None)

    def _turn(self, earlier: datetime, later: datetime) -> timedelta:
        """Return how far the clock on the wall was put forward between two instants; negative if it was turned back."""
        return (self._wall(later) - later.replace(tzinfo=None)) - (
            self._wall(earlier) - earlier.replace(tzinfo=None)
        )

    def _walls(self, start: datetime, direction: int) -> Iterator[datetime]:
        """Yield the wall times that match, after or before the start."""
        walk = copy.copy(self._parsed)
        walk.dt, walk.tick_direction = start.replace(microsecond=0), direction
        return walk

    def _instants(self, wall: datetime) -> list[datetime]:
        """Return the instants that a wall time stands for, in order."""
        if self._zone is None:
            return [wall.replace(tzinfo=UTC)]
        first, second = (wall.replace(tzinfo=self._zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        if first == second:
            return [first]
        if second < first:  # There is no such time: the clock was put forward in between.
            return [self._end_of_gap(second, first)] if self._is_fixed else []
        return [first] if self._is_fixed else [first, second]

    def _end_of_gap(self, before: datetime, after: datetime) -> datetime:
        while after - before > _ONE:
            middle = before + (after - before) // 2 // _ONE * _ONE
            if self._turn(before, middle):
                after = middle
            else:
                before = middle
        return after


def _parse(expression: str) -> CronSim:
    words = _KEYWORDS.get(expression.strip().lower(), expression).split()
    shown = expression if len(expression) <= 60 else f"{expression[:60]}…"
    if len(expression) > LONGEST_EXPRESSION:
        raise InvalidRequest(
            f"cron {shown!r} has {len(expression)} characters: at most {LONGEST_EXPRESSION}; a list of expressions is a union"
        )
    names = list(_FIELDS)[-len(words) :]
    if len(words) not in (5, 6):
        known = f"or one of {', '.join(_KEYWORDS)}" if expression.startswith("@") else "as in '30 2 * * *'"
        raise InvalidRequest(
            f"cron {shown!r}: give 5 fields ({', '.join(list(_FIELDS)[1:])}) or 6, seconds first, {known}"
        )
    try:
        if "W" in words[-3].upper():
            raise CronSimError("Bad day-of-month")
        return CronSim(" ".join(words), _NAIVE)
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
        field = words[names.index(name)] if name in names else ""
        allowed = f"{_FIELDS.get(name, '')}, with * , - and /"
        raise InvalidRequest(f"cron {shown!r}: {name} {field!r} is wrong: it takes {allowed}") from None


_cron = lru_cache(4096)(Cron)


class Union:
    """The instants of several expressions together."""

    def __init__(self, parts: list[Cron]) -> None:
        self._parts = parts

    def following(self, instant: Micros) -> Micros | None:
        """Return the first one later than this; None if there is none in the next 50 years."""
        return min(
            (one for part in self._parts if (one := part.following(instant)) is not None), default=None
        )

    def latest(self, instant: Micros) -> Micros | None:
        """Return the last one that is not later than this; None if there is none in the 50 years before."""
        return max((one for part in self._parts if (one := part.latest(instant)) is not None), default=None)


Times: TypeAlias = Every | Union


@lru_cache(4096)
def times_of(crons: tuple[str, ...], every: Micros, offset: Micros, zone: str) -> Times:
    """Return the instants of a union of expressions, or of an interval. Raises InvalidRequest."""
    return Every(every, offset) if every else Union([_cron(one, zone) for one in crons])
