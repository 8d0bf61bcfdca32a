"""Marks of axes: round numbers and whole units of time, few of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from taskharbor.jobs import SECOND, Micros
from taskharbor.spark.report.formatting import DAY, HOUR, MINUTE, UNITS, clock, duration, moment, short_count

TIME_STEPS = (
    *(SECOND * n // 10 for n in (1, 2, 5)),
    *(unit * n for unit in (SECOND, MINUTE) for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 7, 14, 28, 56, 112, 364)),
)
LOG_MARKS = (
    *(10**n for n in range(6)),
    *(unit * n for unit in (SECOND, MINUTE, HOUR) for n in (1, 10)),
    *(DAY * n for n in (4, 40, 400)),
)
LOG_NAMES = {MINUTE: "1 min", HOUR: "1 h"}


class Tick(NamedTuple):
    """A mark at a value of an axis."""

    at: float
    label: str


def count_ticks(top: float, most: int = 4, *, whole: bool = True) -> list[Tick]:
    """From 0 to the first round number at or above `top`."""
    step = max(_round_step(max(top, 1e-9) / most), 1.0 if whole else 0.0)
    last = math.ceil(max(top, step) / step - 1e-9)
    return [Tick(n * step, short_count(n * step)) for n in range(last + 1)]


def duration_ticks(top: float, most: int = 4) -> list[Tick]:
    """From 0 to the first mark at or above `top` microseconds, in whole units of time."""
    wanted = max(top, 1.0) / most
    step = _round_step(wanted) if wanted < SECOND else float(_time_step(wanted))
    last = math.ceil(max(top, 1.0) / step - 1e-9)
    unit, name = next((unit, name) for unit, name in UNITS if last * step >= unit)
    return [Tick(n * step, f"{short_count(n * step / unit)} {name}" if n else "0") for n in range(last + 1)]


def log_ticks(low: float, high: float) -> list[Tick]:
    """Powers of ten below a minute and usual lengths of time above; one mark at or outside each end."""
    below = [mark for mark in LOG_MARKS if mark <= low][-1:]
    inside = [mark for mark in LOG_MARKS if low < mark < high]
    above = [mark for mark in LOG_MARKS if mark >= high][:1]
    return [Tick(float(mark), LOG_NAMES.get(mark) or duration(mark)) for mark in (*below, *inside, *above)]


def time_ticks(start: Micros, end: Micros, most: int) -> list[Tick]:
    """Return ticks at whole steps of the clock. Midnight shows the day instead of the time."""
    step = _time_step(max(1, end - start) / most)
    ticks = []
    for at in range(-(-start // step) * step, end + 1, step):
        is_day = at % DAY == 0 and step >= MINUTE
        ticks.append(Tick(at, f"{moment(at).day} {moment(at):%b}" if is_day else clock(at, step)))
    return ticks


def _time_step(wanted: float) -> Micros:
    step = next((one for one in TIME_STEPS if one >= wanted), TIME_STEPS[-1])
    return step * math.ceil(wanted / step)


def _round_step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))
