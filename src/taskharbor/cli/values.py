"""Durations and instants, as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from taskharbor.jobs import SECOND, Micros, to_datetime

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # Generic only since click 8.2 or so; 8.1 will do.

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)")
_WHOLE = re.compile(rf"(?:{_PART.pattern}\s*)+")
_LONGEST = 100 * 366 * 86_400.0


class Duration(ParamType):
    """`90`, `1.5s`, `10m`, `2h30m`, `7d`: a timedelta."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta | None:
        if isinstance(value, timedelta):
            return value
        seconds = parse_seconds(str(value))
        if seconds is None:
            self.fail(
                f"{value!r} is not a duration: write seconds, or like 500ms, 30s, 10m, 2h30m, 7d", param, ctx
            )
        return timedelta(seconds=seconds)


class DurationOrForever(Duration):
    """The same, or `forever`: None is what the contract calls that."""

    FOREVER = timedelta.max

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta | None:
        if str(value).lower() in ("forever", "none", "never"):
            return self.FOREVER
        return super().convert(value, param, ctx)


class Instant(ParamType):
    """ISO 8601; without a zone it is this computer's local time."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return datetime.fromisoformat(str(value)).astimezone()
        except (ValueError, OverflowError):
            self.fail(
                f"{value!r} is not a time: write like 2026-08-01T09:30 (local) or 2026-08-01T09:30Z",
                param,
                ctx,
            )


DURATION = Duration()
COUNT = click.IntRange(min=1)
FILE = click.Path(path_type=Path)
DURATION_OR_FOREVER = DurationOrForever()
INSTANT = Instant()


def value_option(name: str, kind: Any, help: str, default: Any = None) -> Callable[[F], F]:
    """An option with one value, shown with its default."""
    metavar = {DURATION: "DURATION", FILE: "FILE"}.get(kind, "N")
    return click.option(
        name, type=kind, default=default, show_default=default is not None, metavar=metavar, help=help
    )


def parse_seconds(text: str) -> float | None:
    text = text.strip().lower()
    try:
        seconds = float(text)
    except ValueError:
        if not _WHOLE.fullmatch(text):
            return None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return seconds if 0 <= seconds <= _LONGEST else None


def duration_text(duration: Micros) -> str:
    """Two figures that matter: 12 ms, 1.4 s, 3 m 20 s, 2 h 5 m, 4 d."""
    sign, us = ("-", -duration) if duration < 0 else ("", duration)
    seconds = us / SECOND
    if us < 1000:
        return f"{sign}{us} µs" if us else "0 s"
    if seconds < 0.9995:
        return f"{sign}{us / 1000:.0f} ms"
    if seconds < 59.95:
        return f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, small_size in (
        ("d", 86_400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // small_size
            return f"{sign}{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{sign}{whole} s"


def relative_text(when: Micros, now: Micros) -> str:
    """`3 m ago`, `in 20 s`, `now`."""
    apart = when - now
    if abs(apart) < SECOND // 2:
        return "now"
    return f"in {coarse_text(apart)}" if apart > 0 else f"{coarse_text(-apart)} ago"


def coarse_text(duration: Micros) -> str:
    """One unit, for tables: 20 s, 3 m, 2 h."""
    seconds = duration / SECOND
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def local_text(when: Micros) -> str:
    return to_datetime(when).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def iso_text(when: Micros | None) -> str | None:
    return None if when is None else to_datetime(when).isoformat().replace("+00:00", "Z")


def kept_text(kept: Micros | None) -> str:
    return "forever" if kept is None else duration_text(kept) if kept else "not at all"


def count_text(count: int) -> str:
    """At most five characters, for tables."""
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if count >= size:
            scaled = count / (1000 if unit == "k" else size)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return str(count)


def parse_pairs(pairs: tuple[str, ...], option: str) -> dict[str, str]:
    """`k=v` options as a mapping."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r}: write it like {option} name=value")
        parsed[name] = value
    return parsed
