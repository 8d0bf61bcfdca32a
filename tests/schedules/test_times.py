"""Instants of cron expressions and intervals: the table of summer time, all zones by property, and errors that name the field."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.expected import RULES, instants
from taskharbor import InvalidRequest
from taskharbor.jobs import SECOND, Micros, to_datetime, to_micros
from taskharbor.schedules.times import Times, times_of

ZONES = sorted(available_timezones() - {"localtime", "Factory"})
SAMPLE = [
    "UTC",
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/New_York",
    "America/Santiago",
    "Antarctica/Casey",
    "Antarctica/Troll",
    "Asia/Pyongyang",
    "Australia/Lord_Howe",
    "Europe/Berlin",
    "Europe/Dublin",
    "Pacific/Apia",
]
"""Gaps at midnight, of half an hour, of two hours and of a day; clocks that are turned back by three hours."""
FIXED = ["30 2 * * *", "0,15 0-3 * * *", "59 23 * * *", "0 0 29 2 *", "45 1 * * SUN#1", "5 0 L * *"]
WILD = ["*/30 * * * *", "*/20 0-3 * * *", "* 2 * * SUN", "10 * * * *", "0 */2 L * *"]


def cron(*expressions: str, zone: str = "UTC") -> Times:
    return times_of(expressions, 0, 0, zone)


def forwards(times: Times, after: Micros, count: int) -> list[Micros]:
    found: list[Micros] = []
    while len(found) < count and (tick := times.following(found[-1] if found else after)) is not None:
        found.append(tick)
    return found


def backwards(times: Times, until: Micros, count: int) -> list[Micros]:
    found: list[Micros] = []
    while len(found) < count and (tick := times.latest(found[-1] - 1 if found else until)) is not None:
        found.append(tick)
    return found[::-1]


def on_the_wall(expression: str, zone: str, day: tuple[int, int, int], count: int) -> list[str]:
    midnight = to_micros(datetime(*day, tzinfo=ZoneInfo(zone)))
    found = forwards(cron(expression, zone=zone), midnight - 1, count)
    return [to_datetime(one).astimezone(ZoneInfo(zone)).strftime("%d %H:%M %z") for one in found]


def test_a_time_that_summer_time_skips_is_the_end_of_the_gap() -> None:
    assert on_the_wall("30 2 * * *", "Europe/Berlin", (2026, 3, 28), 3) == [
        "28 02:30 +0100",
        "29 03:00 +0200",
        "30 02:30 +0200",
    ]


def test_a_time_that_comes_twice_counts_once_the_first_time() -> None:
    assert on_the_wall("30 2 * * *", "Europe/Berlin", (2026, 10, 24), 3) == [
        "24 02:30 +0200",
        "25 02:30 +0200",
        "26 02:30 +0100",
    ]


def test_a_wildcard_goes_by_elapsed_time() -> None:
    assert on_the_wall("*/30 * * * *", "Europe/Berlin", (2026, 10, 25), 9)[4:] == [
        "25 02:00 +0200",
        "25 02:30 +0200",
        "25 02:00 +0100",
        "25 02:30 +0100",
        "25 03:00 +0100",
    ]
    assert on_the_wall("*/30 * * * *", "Europe/Berlin", (2026, 3, 29), 6)[3:5] == [
        "29 01:30 +0100",
        "29 03:00 +0200",
    ]


def test_seconds_before_a_fixed_time_follow_the_same_rules() -> None:
    (skipped,) = on_the_wall("0 30 2 * * *", "Europe/Berlin", (2026, 3, 29), 1)
    assert skipped == "29 03:00 +0200"


def test_in_the_second_pass_of_an_hour_the_first_one_is_still_known() -> None:
    """A walk backwards from 02:10 of winter time comes by 02:30 of summer time, which was before."""
    times, zone = cron("30 2 * * *", zone="Europe/Berlin"), ZoneInfo("Europe/Berlin")
    now = datetime(2026, 10, 25, 2, 10, tzinfo=zone, fold=1)
    assert times.latest(to_micros(now)) == to_micros(datetime(2026, 10, 25, 2, 30, tzinfo=zone))


def agree(expression: str, zone: str, start: Micros) -> None:
    """Instants only grow, both directions agree, and each is where the rules put it."""
    times, tz = cron(expression, zone=zone), ZoneInfo(zone)
    ticks = forwards(times, start, 12)
    assert ticks == sorted(set(ticks))
    assert backwards(times, ticks[-1], len(ticks)) == ticks
    reference = cron(expression)
    for before, tick in zip([start, *ticks], ticks, strict=False):
        at = to_datetime(tick).astimezone(tz)
        wall = at.replace(tzinfo=None, fold=0)
        matches = reference.latest(to_micros(wall.replace(tzinfo=UTC))) == to_micros(wall.replace(tzinfo=UTC))
        earlier = (to_datetime(tick) - timedelta(seconds=1)).astimezone(tz)
        skipped = wall - earlier.replace(tzinfo=None, fold=0) - timedelta(seconds=1)
        if expression in WILD:
            assert matches
        elif matches:
            assert at.fold == 0 or skipped > timedelta()
        else:
            gap = reference.latest(to_micros(wall.replace(tzinfo=UTC)))
            assert gap is not None
            assert to_micros(wall.replace(tzinfo=UTC)) - gap <= to_micros(skipped)
        if expression in WILD and tick - before < 40 * 60 * SECOND * 24:
            # None in between was left out.
            for instant in range(before + 60 * SECOND - before % (60 * SECOND), tick, 300 * SECOND):
                wall = to_datetime(instant).astimezone(tz).replace(tzinfo=UTC, fold=0)
                assert reference.latest(to_micros(wall)) != to_micros(wall)


INSTANTS = st.integers(
    to_micros(datetime(2009, 1, 1, tzinfo=UTC)), to_micros(datetime(2029, 1, 1, tzinfo=UTC))
)


@lru_cache
def near_a_change(zone: str) -> list[Micros]:
    """The hours around each change of the clock in twenty years."""
    tz, found = ZoneInfo(zone), list[Micros]()
    day = datetime(2009, 1, 1, tzinfo=UTC)
    while day.year < 2029:
        following = day + timedelta(days=1)
        if day.astimezone(tz).utcoffset() != following.astimezone(tz).utcoffset():
            found += [to_micros(day + timedelta(hours=hours, minutes=10)) for hours in (0, 12, 20, 24)]
        day = following
    return found


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SAMPLE), st.sampled_from(FIXED + WILD), INSTANTS)
def test_both_rules_hold_in_a_sample_of_zones(zone: str, expression: str, start: Micros) -> None:
    agree(expression, zone, start)


@pytest.mark.parametrize("zone", SAMPLE)
def test_both_rules_hold_where_the_clock_is_changed(zone: str) -> None:
    for start in near_a_change(zone)[-24:]:
        for expression in ("30 2 * * *", "0,15 0-3 * * *", "*/30 * * * *", "*/20 0-3 * * *"):
            agree(expression, zone, start)


@pytest.mark.slow
@pytest.mark.parametrize("zone", ZONES)
def test_both_rules_hold_in_every_zone(zone: str) -> None:
    for start in near_a_change(zone)[::3]:
        for expression in FIXED[:2] + WILD[:2]:
            agree(expression, zone, start)


def changes(zones: Iterable[str]) -> list[tuple[str, datetime]]:
    """Zones and days of twenty years: one for each way in which a clock is changed somewhere."""
    found: dict[tuple[timedelta | None, ...], tuple[str, datetime]] = {}
    for zone in zones:
        tz = ZoneInfo(zone)
        for day in sorted({to_datetime(one).date() for one in near_a_change(zone)[::4]}):
            midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
            quarters = (midnight + timedelta(minutes=15 * n) for n in range(-192, 384))
            found.setdefault(tuple(at.astimezone(tz).utcoffset() for at in quarters), (zone, midnight))
    return list(found.values())


def agree_with_brute_force(zone: str, midnight: datetime) -> None:
    """No instant is left out and none is added, in both directions, in the three days around a change."""
    low, high = (to_micros(midnight + timedelta(days=days)) for days in (-1, 2))
    for rule in RULES:
        if not rule.cron:
            continue
        times, expected = cron(rule.cron, zone=zone), instants(rule, zone, midnight)
        expected = [one for one in expected if low <= one < high]
        following = times.following(expected[-1]) if expected else None
        assert forwards(times, low - 1, len(expected)) == expected, (zone, midnight, rule.cron)
        assert backwards(times, high - 1, len(expected)) == expected, (zone, midnight, rule.cron)
        assert following is None or following >= high


@pytest.mark.parametrize("zone", SAMPLE)
def test_the_instants_around_a_change_are_those_of_brute_force(zone: str) -> None:
    for _, midnight in changes([zone])[-2:]:
        agree_with_brute_force(zone, midnight)


@pytest.mark.slow
def test_the_instants_around_any_change_in_twenty_years_are_those_of_brute_force() -> None:
    found = changes(ZONES)
    assert len(found) > 100
    for zone, midnight in found:
        agree_with_brute_force(zone, midnight)


def test_an_interval_is_counted_from_the_epoch() -> None:
    times = times_of((), 15 * SECOND, 5 * SECOND, "UTC")
    assert forwards(times, 4 * SECOND, 3) == [5 * SECOND, 20 * SECOND, 35 * SECOND]
    assert backwards(times, 34 * SECOND, 2) == [5 * SECOND, 20 * SECOND]


def test_several_expressions_are_a_union() -> None:
    times = cron("0 6 * * *", "0 18 * * *", "0 6,7 * * MON")
    hours = [
        to_datetime(one).hour for one in forwards(times, to_micros(datetime(2026, 11, 15, 20, tzinfo=UTC)), 5)
    ]
    assert hours == [6, 7, 18, 6, 18]


@pytest.mark.parametrize(
    ("keyword", "same"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@Yearly", "0 0 1 1 *"),
    ],
)
def test_keywords(keyword: str, same: str) -> None:
    assert forwards(cron(keyword), 0, 4) == forwards(cron(same), 0, 4)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("61 * * * *", "minute '61' is wrong: it takes 0-59"),
        ("0 24 * * *", "hour '24' is wrong: it takes 0-23"),
        ("90 0 24 * * *", "second '90' is wrong: it takes 0-59"),
        ("0 0 LW * *", "day-of-month 'LW' is wrong: it takes 1-31 or L"),
        ("0 0 30 2 *", "day-of-month '30' is wrong: .* a day that its months have"),
        ("0 0 * 13 *", "month '13' is wrong"),
        ("0 0 * * MON#6", "day-of-week 'MON#6' is wrong: .* MON#2"),
        ("0 0 0-99999999999 * *", "day-of-month"),
        ("0 0 * *", "give 5 fields"),
        ("@dayly", "or one of @yearly"),
        ("0 0 * * * " * 30, "has 300 characters: at most 200"),
        ("", "give 5 fields"),
    ],
)
def test_a_wrong_expression_names_the_field(expression: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        cron(expression)


@pytest.mark.parametrize("zone", ["Europe/Brelin", "", "../etc/passwd", "Europe", "a\0b"])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(InvalidRequest, match="pip install tzdata"):
        cron("0 0 * * *", zone=zone)
