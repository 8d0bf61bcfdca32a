"""The report, drawn from made-up numbers without Spark. Its numbers: test_lake.py."""

from __future__ import annotations

import io
import random
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from types import UnionType
from typing import Any, get_args, get_origin
from xml.etree import ElementTree

import msgspec
import pytest
from markupsafe import escape
from rich.console import Console

from taskharbor.jobs import SECOND
from taskharbor.spark.report import formatting
from taskharbor.spark.report.charts import count_ticks, duration_ticks, log_ticks, time_ticks
from taskharbor.spark.report.data import MOST_BUCKETS, Flow, ReportData, Totals, Verdict, choose
from taskharbor.spark.report.formatting import DAY, HOUR, MINUTE
from taskharbor.spark.report.page import render
from taskharbor.spark.report.summary import sparkline, summary

START = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * SECOND
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\x1b[31m\N{RIGHT-TO-LEFT OVERRIDE}"
NOTHING = ReportData(sources=[], start_us=0, bucket_us=1, buckets=0, made_at_us=START)


def made_up(*, buckets: int = 60, bucket_us: int = MINUTE, text: str = "mail", **changes: Any) -> ReportData:
    """Some number in every field, one per bucket in lists of numbers, and the text in every text."""
    dice = random.Random(7)

    def value(kind: Any) -> Any:
        inner = get_args(kind)
        if kind is str:
            return text
        if kind in (int, float):
            return kind(dice.randint(0, 90))
        if get_origin(kind) is UnionType:
            return dice.choice((None, value(inner[0])))
        if get_origin(kind) is list:
            is_of_numbers = not isinstance(inner[0], type) or not issubclass(inner[0], msgspec.Struct | str)
            return [value(inner[0]) for _ in range(buckets if is_of_numbers else 6)]
        if get_origin(kind) is dict:
            return {name: value(inner[1]) for name in ("done", "retried", "dead", text)}
        return kind(**{field.name: value(field.type) for field in msgspec.structs.fields(kind)})

    whole: ReportData = value(ReportData)
    known: dict[str, Any] = {"sources": [f"sqlite:////data/{text}"], "start_us": START, "buckets": buckets}
    known |= dict.fromkeys(("bucket_us", "worker_bucket_us", "objective_bucket_us"), bucket_us)
    known |= {"made_at_us": START + DAY, "verdict": Verdict(leases=3921, jobs=2931)}
    return msgspec.structs.replace(whole, **known | changes)


class Outline(HTMLParser):
    """Checks that every element is closed by the one it should be."""

    EMPTY = frozenset(("meta", "br"))

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.names: set[str] = set()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# -- the page -------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_describes_its_drawings_and_needs_no_network_and_no_script() -> None:
    page = render(made_up())
    found = Outline(page)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) > 15
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        assert tree.get("aria-label") or tree.get("aria-hidden")
        assert "nan" not in drawing
    assert "<title>" in "".join(drawings), "bands that say their numbers when the pointer is over them"
    # A clean audit is the first thing said.
    verdict = found.text.index("No violation in 3,921 leases of 2,931 jobs.")
    assert verdict < found.text.index("Throughput") < found.text.index("Slowest jobs")

    assert found.names.isdisjoint(("script", "link", "img", "iframe", "object"))
    assert not [name for name, _ in found.attributes if name in ("src", "href", "xlink:href")]
    assert "url(" not in page
    assert "@import" not in page
    # It follows the reader's light or dark setting.
    light, dark = (set(re.findall(r"(--[\w-]+): #", part)) for part in re.split(r"@media \(prefers.*", page))
    assert light == dark
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= light | {"--look", "--tone"}


def test_whatever_was_stored_is_shown_as_text_and_never_as_markup_or_hidden() -> None:
    page = Outline(render(made_up(text=HOSTILE)))
    assert page.names.isdisjoint(("script", "img"))
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    shown = HOSTILE.replace("\x1b", "\ufffd").replace("\N{RIGHT-TO-LEFT OVERRIDE}", "\ufffd")
    assert shown in page.text
    assert [value for _, value in page.attributes if value and shown in value]
    assert not [value for _, value in page.attributes if value and not value.replace("\n", "").isprintable()]


BROKEN = Verdict(leases=10, jobs=9, kinds={"overlapping leases": 2, "lost job": 1}, examples=["job 7 was"])
EMPTY_FLOW = Flow(**{name: [0, 0] for name in Flow.__struct_fields__})
ENDED = {"totals": Totals(jobs=1, cancelled=1), "flow": EMPTY_FLOW, "job_ends": {"cancelled": 1}}
BARE = msgspec.structs.replace(NOTHING, sources=["a", "b"], buckets=2, **ENDED)
BURST = made_up(
    flow=msgspec.structs.replace(made_up().flow, arrivals=[100_000] + [0] * 59),
    totals=msgspec.structs.replace(made_up().totals, busiest_minute_us=START),
)
VIOLATIONS = ["3 violations in 10 leases of 9 jobs.", "2 overlapping leases", "job 7"]
MANY = made_up(totals=msgspec.structs.replace(made_up().totals, executions=201, dead=3))
ESTIMATES = ["95% within about ", "one in twenty took about ", "is between 97.7% and 100%"]
COUNTED = ["3 are dead now: the others were requeued since.", "Counted at the end of each minute: at most "]
OWN_SCALE = "scale of their own"


@pytest.mark.parametrize(
    ("data", "said", "unsaid"),
    [
        (made_up(verdict=BROKEN), VIOLATIONS, "No violation"),
        (made_up(verdict=None), ["Not audited."], "No violation"),
        (NOTHING, ["Nothing yet"], "Throughput"),
        (BARE, ["Nothing was completed.", "2 stores"], "Run time"),
        (BURST, [OWN_SCALE], "Nothing"),
        (made_up(), ["Run time"], OWN_SCALE),
        (MANY, [*ESTIMATES, *COUNTED], OWN_SCALE),
    ],
    ids=["violations", "no audit", "no rows", "no leases", "burst", "calm", "many"],
)
def test_the_page_says_what_there_is(data: ReportData, said: list[str], unsaid: str) -> None:
    """It leaves out what it cannot show."""
    text = Outline(render(data)).text
    assert [words for words in said if words not in text] == []
    assert unsaid not in text


@pytest.mark.parametrize(("buckets", "bucket_us"), [(1, MINUTE), (2, SECOND // 5), (500, 24 * HOUR)])
def test_any_span_can_be_drawn(buckets: int, bucket_us: int) -> None:
    page = render(made_up(buckets=buckets, bucket_us=bucket_us))
    Outline(page)
    assert len(page) < 2_500_000


# -- words and marks --------------------------------------------------------------------------------------------


def test_durations_shares_and_numbers_are_short() -> None:
    said = {0: "0 s", 12: "12 µs", 84_000: "84 ms", 1_250_000: "1.25 s", 90 * SECOND: "90 s"}
    said |= {200 * SECOND: "3.33 min", 26 * HOUR: "26 h", 3 * DAY: "3 d"}
    assert {micros: formatting.duration(micros) for micros in said} == said
    assert formatting.duration(None) == "\N{EN DASH}"
    # Shares are never rounded to nothing or to everything, and large numbers are shortened.
    shares = {(1, 10**6): "<0.1%", (999_999, 10**6): ">99.9%", (1, 3): "33.3%"}
    shares |= {(0, 10): "0%", (10, 10): "100%"}
    assert {share: formatting.percent(*share) for share in shares} == shares
    shortened = [formatting.short_count(one) for one in (0, 7, 950, 1200, 34_000, 5_600_000)]
    assert shortened == ["0", "7", "950", "1.2k", "34k", "5.6M"]


def test_a_number_stays_with_its_unit_and_what_cannot_be_seen_is_shown() -> None:
    assert formatting.unbroken("within 84 ms of 3 jobs") == "within 84\N{NO-BREAK SPACE}ms of 3 jobs"
    hidden = formatting.unbroken("a\N{RIGHT-TO-LEFT OVERRIDE}b\ud800\x00<") + formatting.unbroken(" 1 s")
    assert escape(formatting.visible(hidden)) == "a\ufffdb\ufffd\ufffd&lt; 1\N{NO-BREAK SPACE}s"


def test_marks_reach_the_highest_value_and_are_few() -> None:
    dice = random.Random(11)
    for _ in range(500):
        top = 10 ** dice.uniform(0, 12)
        for ticks in (count_ticks(top), duration_ticks(top)):
            assert ticks[0].at == 0
            assert ticks[-1].at >= top * (1 - 1e-6)
            assert 2 <= len(ticks) <= 6
        start = START + dice.randrange(DAY)
        over_time = time_ticks(start, start + max(SECOND, int(top)), 8)
        assert len(over_time) <= 9
        assert all(start <= tick.at <= start + max(SECOND, top) for tick in over_time)
    labels = ", ".join(tick.label for tick in log_ticks(900, 90 * SECOND))
    assert labels == "100 µs, 1 ms, 10 ms, 100 ms, 1 s, 10 s, 1 min, 10 min"


def test_time_is_cut_into_at_most_a_few_hundred_steps() -> None:
    for span in (1, SECOND, 20 * SECOND, 10 * MINUTE, 11 * MINUTE, DAY, 10 * DAY, 11 * DAY, 3000 * DAY):
        buckets = choose(START, START + span - 1)
        assert 1 <= buckets.number <= MOST_BUCKETS + 1
        assert buckets.start_us <= START
        assert buckets.end_us >= START + span
    origins = [choose(START, START + span).origin for span in (20 * SECOND, DAY, 100 * DAY)]
    assert origins == ["silver.attempts", "gold.minutes", "gold.hours"]


# -- the terminal -------------------------------------------------------------------------------------------------


def test_a_sparkline_shows_peaks_and_gaps() -> None:
    assert sparkline([0, 1, 2, 4, None, 8]) == "▁▂▃▅ █"
    assert sparkline([0.0] * 100, width=10) == "▁" * 10
    assert sparkline([0] * 99 + [5], width=10) == "▁" * 9 + "█"
    assert sparkline([]) == ""


def test_the_summary_fits_a_terminal_and_cannot_steer_it() -> None:
    screen = io.StringIO()
    Console(file=screen, width=100).print(summary(made_up(text=HOSTILE)))
    said = screen.getvalue()
    assert "No violation in 3,921 leases of 2,931 jobs." in said
    assert "\x1b" not in said
    assert "at the end of 60 s" in said
    assert max(map(len, said.splitlines())) <= 100
