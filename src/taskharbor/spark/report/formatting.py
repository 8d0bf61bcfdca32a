"""Numbers, instants and stored text as people read them, for the page and the terminal. Instants are UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from unicodedata import category

from taskharbor.jobs import SECOND, Micros

MILLISECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
UNITS = ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"), (MILLISECOND, "ms"), (1, "\N{MICRO SIGN}s"))

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUS = "\N{MINUS SIGN}"
_REPLACED = "\N{REPLACEMENT CHARACTER}"
_NUMBER_AND_UNIT = re.compile(rf"(\d) ({'|'.join(name for _, name in UNITS)})\b")


def count(number: float) -> str:
    """1234567 as 1,234,567."""
    return f"{round(number):,}".replace("-", _MINUS)


def short_count(number: float) -> str:
    """Short form for axes and narrow places: 950, 1.2k, 34k, 5.6M."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{_significant(number / factor, 3)}{letter}"
    return _significant(number, 3)


def percent(part: float, whole: float) -> str:
    """A share. It reads 0 or 100 per cent only if it is exactly that."""
    share = 100 * part / whole if whole > 0 else 0
    if 0 < share < 0.1:
        return "<0.1%"
    if 99.9 < share < 100:
        return ">99.9%"
    return f"{_significant(share, 3 if share >= 10 else 2)}%"


def duration(micros: float | None) -> str:
    """Three digits and one unit. A unit larger than a second is used from two of it on."""
    if micros is None:
        return "\N{EN DASH}"
    if micros < 0:
        return _MINUS + duration(-micros)
    if micros < 0.5:
        return "0 s"
    for unit, name in UNITS[:-1]:
        if micros >= (2 * unit if unit > SECOND else unit):
            return f"{_significant(micros / unit, 3)} {name}"
    return f"{round(micros)} {UNITS[-1][1]}"


def moment(micros: Micros) -> datetime:
    """The instant as a datetime in UTC."""
    return _EPOCH + timedelta(microseconds=micros)


def clock(micros: Micros, step: Micros) -> str:
    """Time of day, as exact as steps of this length need."""
    at = moment(micros)
    tenth = f".{at.microsecond // 100_000}" if step % SECOND else ""
    return f"{at:%H:%M}" if step % MINUTE == 0 else f"{at:%H:%M:%S}{tenth}"


def time_of(micros: Micros, step: Micros, span: Micros) -> str:
    """An instant in a history of this span: with the day only if there is more than one."""
    day = "" if span <= DAY else f"{moment(micros).day} {moment(micros):%b} "
    return day + clock(micros, step)


def span_text(start: Micros, end: Micros) -> str:
    """Start, end and length of a history."""
    first, last = moment(start), moment(end)
    shape = "%H:%M:%S" if end - start < HOUR else "%H:%M"
    until = last.strftime(shape if first.date() == last.date() else f"%Y-%m-%d {shape}")
    return f"{first:%Y-%m-%d {shape}} to {until} UTC ({duration(end - start)})"


def plural(number: float, noun: str) -> str:
    """1 job, 2 jobs."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def shortened(text: str, most: int) -> str:
    """The text on one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def unbroken(text: str) -> str:
    """Running text in which a number and its unit stay on one line."""
    return _NUMBER_AND_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)


def visible(text: str) -> str:
    """The text with control and format characters replaced, so that nothing stored is invisible on the page."""
    if text.isprintable():
        return text
    return "".join(one if one == "\n" or category(one)[0] != "C" else _REPLACED for one in text)


def _significant(number: float, digits: int) -> str:
    if number == 0:
        return "0"
    whole = len(str(int(abs(number))))
    rounded = round(number, max(0, digits - (0 if abs(number) < 1 else whole)))
    return f"{rounded:.{digits}f}".rstrip("0").rstrip(".").replace("-", _MINUS)
