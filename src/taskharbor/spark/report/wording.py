"""Numbers and times as people read them. Instants are UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import escape
from unicodedata import category

from taskharbor.jobs import SECOND, Micros

MILLISECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUS = "\N{MINUS SIGN}"
_MICRO = "\N{MICRO SIGN}"
_NUMBER_AND_UNIT = re.compile(rf"(\d) (ms|s|min|h|d|{_MICRO}s)\b")


def count(number: float) -> str:
    """1234567 as 1,234,567."""
    return f"{round(number):,}".replace("-", _MINUS)


def short_count(number: float) -> str:
    """For axes and narrow places: 950, 1.2k, 34k, 5.6M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{_significant(number / factor, 3)}{letter}"
    return _significant(number, 3)


def percent(part: float, whole: float) -> str:
    """A share. Never 0 or 100 per cent where it is only nearly that."""
    if whole <= 0:
        return "0%"
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "<0.1%"
    if 99.9 < share < 100:
        return ">99.9%"
    return f"{_significant(share, 3 if share >= 10 else 2)}%"


def duration(micros: float | None) -> str:
    """Three digits are enough to see, and one unit is enough to compare."""
    if micros is None:
        return "\N{EN DASH}"
    if micros < 0:
        return _MINUS + duration(-micros)
    if micros < 0.5:
        return "0 s"
    for least, unit, name in (
        (2 * DAY, DAY, "d"),
        (2 * HOUR, HOUR, "h"),
        (2 * MINUTE, MINUTE, "min"),
        (SECOND, SECOND, "s"),
        (MILLISECOND, MILLISECOND, "ms"),
    ):
        if micros >= least:
            return f"{_significant(micros / unit, 3)} {name}"
    return f"{round(micros)} {_MICRO}s"


def instant(micros: Micros) -> str:
    """A day and a time of day, to the second."""
    return _at(micros).strftime("%Y-%m-%d %H:%M:%S")


def time_of(micros: Micros, step: Micros, span: Micros) -> str:
    """An instant as exactly as steps of this length deserve, with the day only where there is more than one."""
    moment = _at(micros)
    clock = moment.strftime("%H:%M" if step % MINUTE == 0 else "%H:%M:%S")
    if step % SECOND:
        clock += f".{moment.microsecond // 100_000}"
    return clock if span <= DAY else f"{moment.day} {moment:%b} {clock}"


def span_text(start: Micros, end: Micros) -> str:
    """From when to when, and how long."""
    first, last = _at(start), _at(end)
    shape = "%H:%M:%S" if end - start < HOUR else "%H:%M"
    until = last.strftime(shape) if first.date() == last.date() else f"{last:%Y-%m-%d {shape}}"
    return f"{first:%Y-%m-%d {shape}} to {until} UTC ({duration(end - start)})"


def plural(number: int, one: str, many: str | None = None) -> str:
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def shortened(text: str, most: int) -> str:
    """On one line, and cut in the middle of nothing."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def in_lines(text: str) -> str:
    """For running text: a number and its unit stay on one line."""
    return _NUMBER_AND_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)


def escaped(text: str) -> str:
    """As text of a page. Control and format characters are made visible, so that nothing stored can hide in it."""
    return escape(
        "".join(
            one if one == "\n" or category(one)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for one in text
        )
    )


def _significant(number: float, digits: int) -> str:
    if number == 0:
        return "0"
    whole = len(str(int(abs(number))))
    rounded = round(number, max(0, digits - (0 if abs(number) < 1 else whole)))
    text = f"{rounded:.{digits}f}".rstrip("0").rstrip(".")
    return text.replace("-", _MINUS)


def _at(micros: Micros) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)
