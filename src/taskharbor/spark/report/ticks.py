"""Where an axis has its marks: round numbers, whole units of time, few of them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from taskharbor.jobs import SECOND, Micros
from taskharbor.spark.report.wording import DAY, HOUR, MILLISECOND, MINUTE, duration, short_count


class Tick(NamedTuple):
    at: float
    label: str


_TIME_STEPS = (
    *(SECOND * n // 10 for n in (1, 2, 5)),
    *(SECOND * n for n in (1, 2, 5, 10, 15, 30)),
    *(MINUTE * n for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 7, 14, 28, 56, 112, 364)),
)
_LOG_MARKS = (
    *(10**n for n in range(6)),
    *(SECOND * n for n in (1, 10)),
    *(MINUTE * n for n in (1, 10)),
    *(HOUR * n for n in (1, 10)),
    *(DAY * n for n in (4, 40, 400)),
)
_LOG_NAMES = {MINUTE: "1 min", HOUR: "1 h"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def count_ticks(top: float, most: int = 4, *, whole: bool = True) -> list[Tick]:
    """From 0 to the first round number at or above `top`."""
    step = _round_step(max(top, 1e-9) / most)
    if whole:
        step = max(1.0, step)
    return [Tick(n * step, short_count(n * step)) for n in range(math.ceil(max(top, step) / step - 1e-9) + 1)]


def duration_ticks(top: float, most: int = 4) -> list[Tick]:
    """The same for microseconds, in whole units of time."""
    wanted = max(top, 1.0) / most
    if wanted < SECOND:
        step = _round_step(wanted)
    else:
        step = float(next((one for one in _TIME_STEPS if one >= wanted), _TIME_STEPS[-1]))
        if step < wanted:
            step *= math.ceil(wanted / step)
    last = math.ceil(max(top, 1.0) / step - 1e-9)
    unit, name = next(
        (unit, name)
        for unit, name in (
            (DAY, "d"),
            (HOUR, "h"),
            (MINUTE, "min"),
            (SECOND, "s"),
            (MILLISECOND, "ms"),
            (1, "\N{MICRO SIGN}s"),
        )
        if last * step >= unit
    )
    return [Tick(n * step, f"{short_count(n * step / unit)} {name}" if n else "0") for n in range(last + 1)]


def log_ticks(low: float, high: float) -> list[Tick]:
    """Powers of ten below a minute, and what people use instead above; one mark at or outside each end."""
    below = [mark for mark in _LOG_MARKS if mark <= low][-1:]
    inside = [mark for mark in _LOG_MARKS if low < mark < high]
    above = [mark for mark in _LOG_MARKS if mark >= high][:1]
    return [Tick(float(mark), _LOG_NAMES.get(mark) or duration(mark)) for mark in (*below, *inside, *above)]


def time_ticks(start: Micros, end: Micros, most: int) -> list[Tick]:
    """Whole steps of the clock; midnight carries the day instead of the time."""
    span = max(1, end - start)
    step = next((one for one in _TIME_STEPS if span / one <= most), _TIME_STEPS[-1])
    if span / step > most:
        step *= math.ceil(span / step / most)
    first = -(-start // step) * step
    return [Tick(float(at), _clock(at, step)) for at in range(first, end + 1, step)]


def _clock(at: Micros, step: Micros) -> str:
    moment = _EPOCH + timedelta(microseconds=at)
    if step >= DAY or (at % DAY == 0 and step >= MINUTE):
        return f"{moment.day} {moment:%b}"
    if step >= MINUTE:
        return f"{moment:%H:%M}"
    if step >= SECOND:
        return f"{moment:%H:%M:%S}"
    return f"{moment:%H:%M:%S}.{moment.microsecond // 100_000}"


def _round_step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))
