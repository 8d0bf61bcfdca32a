"""Into which steps the report cuts time: few enough to draw, fine enough to see something."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from taskharbor.jobs import SECOND, Micros
from taskharbor.spark.report.wording import DAY, HOUR, MINUTE

MOST_BUCKETS = 500
SHORT = 10 * MINUTE
"""Up to here minutes would be too coarse: the rows themselves are counted instead of gold."""
LONG = 10 * DAY
"""From here on hours are fine enough."""

Origin: TypeAlias = Literal["silver.attempts", "gold.minutes", "gold.hours"]

_SECONDS = (SECOND // 5, SECOND // 2, SECOND, 2 * SECOND, 5 * SECOND, 10 * SECOND)
_SECONDS_SHOWN = 60
"""How many buckets a short history should have at most: with fewer jobs in each, rates would only show chance."""
_MINUTES = tuple(MINUTE * n for n in (1, 2, 5, 10, 15, 30))
_HOURS = tuple(HOUR * n for n in (1, 2, 3, 6, 12, 24))


class Buckets(NamedTuple):
    start_us: Micros
    bucket_us: Micros
    number: int
    origin: Origin

    @property
    def end_us(self) -> Micros:
        return self.start_us + self.bucket_us * self.number


def choose(first_us: Micros, last_us: Micros) -> Buckets:
    """Steps for what happened from `first_us` up to and including `last_us`."""
    span = last_us - first_us + 1
    if span <= SHORT:
        return _cut(first_us, last_us, _first_with(_SECONDS, span, _SECONDS_SHOWN), "silver.attempts")
    if span <= LONG:
        return _cut(first_us, last_us, _first_with(_MINUTES, span, MOST_BUCKETS), "gold.minutes")
    step = _first_with(_HOURS, span, MOST_BUCKETS)
    return _cut(first_us, last_us, step * max(1, -(-span // (step * MOST_BUCKETS))), "gold.hours")


def choose_cells(buckets: Buckets, least_us: Micros, most: int) -> Micros:
    """A coarser step for what has room for fewer: a multiple of `least_us`."""
    span = buckets.end_us - buckets.start_us
    return least_us * max(1, -(-span // (least_us * most)))


def _first_with(steps: tuple[Micros, ...], span: Micros, most: int) -> Micros:
    return next((step for step in steps if span / step <= most - 1), steps[-1])


def _cut(first: Micros, last: Micros, step: Micros, origin: Origin) -> Buckets:
    start = first // step * step
    return Buckets(start, step, (last - start) // step + 1, origin)
