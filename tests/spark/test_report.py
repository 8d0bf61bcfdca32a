"""The report: drawing from made-up numbers without Spark, and counting from a small lake with it."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import msgspec
import pytest
from markupsafe import escape
from rich.console import Console

from taskharbor.bulk.tables import ATTEMPTS
from taskharbor.demo.analysis import SMALL, analyse
from taskharbor.demo.run import Demo
from taskharbor.demo.workload import make_workload
from taskharbor.jobs import SECOND
from taskharbor.spark.report.data import (
    MOST_BUCKETS,
    Backlog,
    Buckets,
    Concurrency,
    ErrorGroup,
    Flow,
    JobLine,
    Objective,
    Percentiles,
    ReportData,
    RunTimes,
    Totals,
    Verdict,
    WorkerLoad,
    choose,
)
from taskharbor.spark.report.formatting import (
    DAY,
    HOUR,
    MINUTE,
    duration,
    percent,
    short_count,
    unbroken,
    visible,
)
from taskharbor.spark.report.page import render
from taskharbor.spark.report.summary import sparkline, summary
from taskharbor.spark.report.ticks import count_ticks, duration_ticks, log_ticks, time_ticks

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

    from taskharbor.spark.lake.layout import Lake

START = int(datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()) * SECOND
HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\x1b[31m"


def made_up(*, buckets: int = 60, bucket_us: int = MINUTE, seed: int = 7, text: str = "mail") -> ReportData:
    print(f"seed {seed}")
    dice = random.Random(seed)

    def counts(most: int) -> list[int]:
        return [dice.randint(0, most) for _ in range(buckets)]

    def times(most: int) -> list[float | None]:
        return [dice.choice((None, dice.random() * most)) for _ in range(buckets)]

    job = JobLine(
        job_id=text,
        queue=text,
        type=text,
        state=text,
        executions=3,
        total_us=5e6,
        waited_us=1e6,
        ran_us=None,
        last_error=text,
    )
    return ReportData(
        sources=[f"sqlite:////data/{text}"],
        start_us=START,
        bucket_us=bucket_us,
        buckets=buckets,
        made_at_us=START + DAY,
        verdict=Verdict(leases=3921, jobs=2931),
        totals=Totals(
            jobs=2931,
            done=2720,
            dead=60,
            cancelled=151,
            executions=3921,
            retried=712,
            expired=37,
            wait_p50_us=4.2e6,
            wait_p95_us=9.1e6,
            run_p50_us=84_000,
            run_p95_us=160_000,
            queues=2,
            workers=2,
            busiest_queue=text,
            busiest_executions=3700,
        ),
        flow=Flow(
            arrivals=counts(40),
            completions=counts(40),
            failures=counts(2),
            retries=counts(9),
            expiries=counts(1),
        ),
        backlog=[Backlog(queue=f"{text}-{n}", waiting=[float(one) for one in counts(500)]) for n in range(8)],
        wait=Percentiles(p50=times(10**6), p95=times(10**7), p99=times(10**8)),
        run_times=[RunTimes(type=text, executions=12, p50_us=900, p95_us=40_000, p99_us=90e6)],
        concurrency=[
            Concurrency(queue=text, running=[float(one) for one in counts(4)], limit=4),
            Concurrency(queue="default", running=[float(one) for one in counts(90)]),
        ],
        workers=[WorkerLoad(worker=text, executions=5, load=times(9))],
        worker_bucket_us=bucket_us,
        errors=[
            ErrorGroup(
                error_type=text,
                fingerprint=text,
                queue=text,
                type=text,
                count=17,
                first_seen_us=START,
                last_seen_us=START + MINUTE,
                sample_message=text,
                sample_job=text,
            )
        ],
        lease_ends={"done": 2720, "retried": 712, "expired": 37, "dead": 60, text: 4},
        job_ends={"done": 2720, "dead": 60, "cancelled": 151},
        slowest=[job],
        most_tried=[job],
        objectives=[Objective(name=text, queue=text, total=100, bad=3, burn=times(3))],
        objective_bucket_us=bucket_us,
    )


class Outline(HTMLParser):
    """Checks that every element is closed by the one it should be."""

    EMPTY = frozenset(("meta", "br"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


# -- the page -------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_every_drawing_is_valid_xml_with_a_description() -> None:
    page = render(made_up())
    outline(page)
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) > 15
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        assert tree.get("aria-label") or tree.get("aria-hidden")
        assert "nan" not in drawing


def test_the_page_needs_no_network_and_no_script() -> None:
    page = outline(render(made_up()))
    assert page.names.isdisjoint(("script", "link", "img", "iframe", "object"))
    assert not [name for name, _ in page.attributes if name in ("src", "href", "xlink:href")]
    assert "url(" not in render(made_up())
    assert "@import" not in render(made_up())


def test_the_page_follows_the_readers_light_or_dark_setting() -> None:
    page = render(made_up())
    light, dark = (set(re.findall(r"(--[\w-]+): #", part)) for part in re.split(r"@media \(prefers.*", page))
    assert light == dark
    assert set(re.findall(r"var\((--[\w-]+)\)", page)) <= light | {"--look", "--tone"}


def test_hidden_characters_are_replaced_in_attributes_too() -> None:
    page = outline(render(made_up(text="a\x1b\N{RIGHT-TO-LEFT OVERRIDE}b")))
    values = [value for _, value in page.attributes if value and "a\ufffd\ufffdb" in value]
    assert values
    assert not [value for _, value in page.attributes if value and not value.replace("\n", "").isprintable()]


def test_whatever_was_stored_is_shown_as_text_and_never_as_markup() -> None:
    page = outline(render(made_up(text=HOSTILE)))
    assert page.names.isdisjoint(("script", "img"))
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}") in "".join(page.text)


def test_a_clean_audit_is_the_first_thing_said() -> None:
    text = "".join(outline(render(made_up())).text)
    verdict = text.index("No violation in 3,921 leases of 2,931 jobs.")
    assert verdict < text.index("Throughput") < text.index("Slowest jobs")


def test_violations_are_named_with_examples() -> None:
    verdict = Verdict(
        leases=10, jobs=9, kinds={"overlapping leases": 2, "lost job": 1}, examples=["job 7 was"]
    )
    page = "".join(outline(render(msgspec.structs.replace(made_up(), verdict=verdict))).text)
    assert "3 violations in 10 leases of 9 jobs." in page
    assert "2 overlapping leases" in page
    assert "job 7 was" in page


def test_without_an_audit_it_says_so() -> None:
    assert "Not audited." in render(msgspec.structs.replace(made_up(), verdict=None))


@pytest.mark.parametrize("buckets", [1, 2, 500])
@pytest.mark.parametrize("bucket_us", [SECOND // 5, MINUTE, 24 * HOUR])
def test_any_span_can_be_drawn(buckets: int, bucket_us: int) -> None:
    page = render(made_up(buckets=buckets, bucket_us=bucket_us))
    outline(page)
    assert len(page) < 2_500_000


def test_a_lake_with_nothing_in_it_gives_a_page_that_says_so() -> None:
    nothing = ReportData(sources=[], start_us=0, bucket_us=1, buckets=0, made_at_us=START)
    assert "Nothing yet" in "".join(outline(render(nothing)).text)


def test_a_history_without_leases_leaves_out_what_it_cannot_show() -> None:
    bare = ReportData(
        sources=["a", "b"],
        start_us=START,
        bucket_us=SECOND,
        buckets=2,
        made_at_us=START,
        totals=Totals(jobs=1, cancelled=1),
        flow=Flow(arrivals=[1, 0], completions=[0, 0], failures=[0, 0], retries=[0, 0], expiries=[0, 0]),
        job_ends={"cancelled": 1},
    )
    page = "".join(outline(render(bare)).text)
    assert "Nothing was completed." in page
    assert "Run time" not in page
    assert "2 stores" in page


def test_a_burst_of_arrivals_does_not_flatten_the_completions() -> None:
    calm = made_up()
    burst = msgspec.structs.replace(calm.flow, arrivals=[100_000] + [0] * 59)
    assert "scale of their own" in render(msgspec.structs.replace(calm, flow=burst))
    assert "scale of their own" not in render(calm)


# -- words and marks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micros", "said"),
    [
        (0, "0 s"),
        (12, "12 µs"),
        (84_000, "84 ms"),
        (1_250_000, "1.25 s"),
        (90 * SECOND, "90 s"),
        (200 * SECOND, "3.33 min"),
        (26 * HOUR, "26 h"),
        (3 * DAY, "3 d"),
        (None, "\N{EN DASH}"),
    ],
)
def test_durations_are_said_in_one_unit(micros: float | None, said: str) -> None:
    assert duration(micros) == said


def test_a_share_is_never_rounded_to_nothing_or_to_everything() -> None:
    assert percent(1, 1_000_000) == "<0.1%"
    assert percent(999_999, 1_000_000) == ">99.9%"
    assert (percent(0, 10), percent(10, 10), percent(1, 3)) == ("0%", "100%", "33.3%")


def test_a_number_stays_with_its_unit_and_what_cannot_be_seen_is_shown() -> None:
    assert unbroken("within 84 ms of 3 jobs") == "within 84\N{NO-BREAK SPACE}ms of 3 jobs"
    hidden = "a\N{RIGHT-TO-LEFT OVERRIDE}b\ud800\x00<"
    assert (
        escape(visible(unbroken(hidden) + unbroken(" 1 s")))
        == "a\ufffdb\ufffd\ufffd&lt; 1\N{NO-BREAK SPACE}s"
    )


def test_large_numbers_are_shortened_on_axes() -> None:
    assert [short_count(one) for one in (0, 7, 950, 1200, 34_000, 5_600_000)] == [
        "0",
        "7",
        "950",
        "1.2k",
        "34k",
        "5.6M",
    ]


def test_marks_reach_the_highest_value_and_are_few() -> None:
    seed = 11
    print(f"seed {seed}")
    dice = random.Random(seed)
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


def test_marks_of_a_logarithmic_axis_enclose_the_values() -> None:
    marks = log_ticks(900, 90 * SECOND)
    assert [tick.label for tick in marks] == [
        "100 µs",
        "1 ms",
        "10 ms",
        "100 ms",
        "1 s",
        "10 s",
        "1 min",
        "10 min",
    ]


def test_time_is_cut_into_at_most_a_few_hundred_steps() -> None:
    for span in (1, SECOND, 20 * SECOND, 10 * MINUTE, 11 * MINUTE, DAY, 10 * DAY, 11 * DAY, 3000 * DAY):
        buckets = choose(START, START + span - 1)
        assert 1 <= buckets.number <= MOST_BUCKETS + 1
        assert buckets.start_us <= START
        assert buckets.end_us >= START + span
    assert choose(START, START + 20 * SECOND).origin == "silver.attempts"
    assert choose(START, START + DAY).origin == "gold.minutes"
    assert choose(START, START + 100 * DAY).origin == "gold.hours"


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
    assert max(map(len, said.splitlines())) <= 100


# -- from a lake --------------------------------------------------------------------------------------------------


def attempt(seq: int, job: str, at: float, **changes: Any) -> dict[str, Any]:
    """A row of the log: created `at` seconds after noon, taken a second later, done half a second after that."""

    def instant(seconds: float) -> datetime:
        return datetime(2026, 3, 1, 12, tzinfo=UTC) + timedelta(seconds=seconds)

    return {
        "seq": seq,
        "job_id": job,
        "queue": "default",
        "type": "send_mail",
        "key": None,
        "priority": 0,
        "fence": 1,
        "worker": "worker-a",
        "created_at": instant(at),
        "run_at": instant(at),
        "reserved_at": instant(at + 1),
        "lease_expires_at": instant(at + 31),
        "ended_at": instant(at + 1.5),
        "outcome": "done",
        "state": "done",
        "error_type": None,
        "error_message": None,
        "payload_size": 10,
    } | {
        key: instant(value) if key.endswith("_at") and value is not None else value
        for key, value in changes.items()
    }


def history() -> list[dict[str, Any]]:
    """Seven minutes: steady work, a job that fails twice, one that dies, one whose worker was lost, one that was cancelled."""
    rows = [attempt(seq, f"steady-{seq}", at=seq * 2.0) for seq in range(200)]
    rows += [
        attempt(
            200 + n,
            "flaky",
            10,
            fence=n + 1,
            run_at=10 + 20 * n,
            reserved_at=15 + 20 * n,
            lease_expires_at=45 + 20 * n,
            ended_at=16 + 20 * n,
            **end,
        )
        for n, end in enumerate(
            (
                {
                    "outcome": "retried",
                    "state": "scheduled",
                    "error_type": "IOError",
                    "error_message": "reset by 10.0.0.1",
                },
                {
                    "outcome": "retried",
                    "state": "scheduled",
                    "error_type": "IOError",
                    "error_message": "reset by 10.0.0.2",
                },
                {},
            )
        )
    ]
    rows += [
        attempt(
            203,
            "dead",
            50,
            queue="api",
            type="call",
            outcome="dead",
            state="dead",
            error_type="ValueError",
            error_message="no",
        ),
        attempt(
            204,
            "stuck",
            60,
            queue="api",
            type="call",
            worker="worker-b",
            ended_at=91,
            outcome="expired",
            state="ready",
        ),
        attempt(
            205,
            "stuck",
            60,
            queue="api",
            type="call",
            fence=2,
            reserved_at=92,
            lease_expires_at=122,
            ended_at=93,
        ),
        attempt(
            206,
            "unwanted",
            70,
            fence=0,
            worker=None,
            reserved_at=None,
            lease_expires_at=None,
            outcome="cancelled",
            state="cancelled",
        ),
    ]
    return rows


@pytest.fixture(scope="module")
def quick_spark(spark: SparkSession) -> Iterator[SparkSession]:
    """The session as the demo sets it up for little data."""
    before = {name: spark.conf.get(name) for name in SMALL}
    for name, value in SMALL.items():
        spark.conf.set(name, value)
    yield spark
    for name, old in before.items():
        spark.conf.set(name, old)


@pytest.fixture(scope="module")
def lake(quick_spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    from pyspark.sql.pandas.types import from_arrow_schema

    from taskharbor.spark.lake.layout import Lake
    from taskharbor.spark.lake.objectives import Objective as Declared
    from taskharbor.spark.lake.run import run_pipeline
    from taskharbor.spark.lake.tables import QUEUE_COLUMNS

    lake = Lake(tmp_path_factory.mktemp("report") / "lake")
    attempts = quick_spark.createDataFrame(history(), from_arrow_schema(ATTEMPTS))
    counts = {field.name: 0 for field in QUEUE_COLUMNS.fields if field.dataType.simpleString() == "bigint"}
    rest = {"head_run_at": None, "paused": False, "failure_queue": None}
    queues = quick_spark.createDataFrame(
        [
            {**counts, **rest, "queue": name, "max_inflight": limit}
            for name, limit in (("api", 4), ("default", None))
        ],
        QUEUE_COLUMNS,
    )
    objectives = [Declared(name="quick", kind="wait", threshold_ms=2000, queue="default")]
    run_pipeline(quick_spark, lake, attempts, name="test", queues=queues, objectives=objectives)
    return lake


def test_the_numbers_are_those_of_the_log(quick_spark: SparkSession, lake: Lake) -> None:
    from taskharbor.spark.audit import audit_lake
    from taskharbor.spark.report import collect

    data = collect(quick_spark, lake, audit=audit_lake(quick_spark, lake))
    assert data.verdict == Verdict(leases=206, jobs=204)
    totals = data.totals
    assert (totals.jobs, totals.done, totals.dead, totals.cancelled, totals.open) == (204, 202, 1, 1, 0)
    assert (totals.executions, totals.retried, totals.expired, totals.workers) == (206, 2, 1, 2)
    assert (totals.busiest_queue, totals.busiest_executions) == ("default", 203)
    assert totals.wait_p50_us == pytest.approx(SECOND, rel=0.03)
    assert totals.run_p50_us == pytest.approx(SECOND / 2, rel=0.03)
    assert data.sources == ["test"]
    assert (data.bucket_us, data.start_us) == (10 * SECOND, START)
    assert sum(data.flow.arrivals) == 204
    assert sum(data.flow.completions) == 202
    assert (sum(data.flow.retries), sum(data.flow.expiries), sum(data.flow.failures)) == (2, 1, 1)
    assert [one.queue for one in data.backlog] == ["default", "api"]
    assert all(one.waiting[-1] == 0 for one in data.backlog)
    assert max(data.backlog[1].waiting) == 1
    assert [(one.queue, one.limit) for one in data.concurrency] == [("api", 4), ("default", None)]
    assert [one.worker for one in data.workers] == ["worker-a", "worker-b"]
    held = sum(load or 0 for load in data.workers[1].load) * data.worker_bucket_us
    assert held == pytest.approx(30 * SECOND)
    assert (data.errors[0].error_type, data.errors[0].count) == ("IOError", 2)
    assert data.slowest[0].job_id == "flaky"
    assert data.slowest[0].total_us == 46 * SECOND
    assert data.most_tried[0].job_id == "flaky"
    assert data.lease_ends == {
        "done": 202,
        "retried": 2,
        "expired": 1,
        "dead": 1,
        "released": 0,
        "cancelled": 0,
    }
    (objective,) = data.objectives
    assert (objective.name, objective.total, objective.bad) == ("quick", 203, 3)
    outline(render(data))


def test_rows_and_gold_tell_the_same(quick_spark: SparkSession, lake: Lake) -> None:
    """Short spans are counted from silver, long ones from gold: over the same buckets both must agree."""
    from pyspark.sql import functions as F

    from taskharbor.spark.lake import gold
    from taskharbor.spark.report import queries

    buckets = Buckets(START, MINUTE, 7)
    attempts, label = lake.read(quick_spark, "silver.attempts"), F.col("queue")

    def sorted_rows(rows: list[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: (row["label"], row["index"]))

    arrived = gold.arrival_tallies(lake.read(quick_spark, "silver.lifecycles"), MINUTE)
    tallies = gold.all_tallies(gold.attempt_tallies(attempts, MINUTE), arrived)
    by_rows = queries.movements(tallies, buckets, label)
    by_gold = queries.movements(lake.read(quick_spark, "gold.minutes"), buckets, label)
    assert sorted_rows(by_rows.collect()) == sorted_rows(by_gold.select(*by_rows.columns).collect())
    minute = F.floor((F.unix_micros("reserved_at") - START) / MINUTE)
    leased = attempts.where(F.col("reserved_at").isNotNull()).groupBy(minute.alias("index"))
    medians = leased.agg(F.percentile_approx("wait_us", 0.5, 1000).alias("exact")).collect()
    exact = {row["index"]: row["exact"] for row in medians}
    for durations in (lake.read(quick_spark, "state.durations"), gold.attempt_durations(attempts, MINUTE)):
        near = queries.waits(durations, buckets).collect()
        assert len(near) == len(exact) == 7
        for row in near:
            assert row["wait_p50_us"] == pytest.approx(exact[row["index"]], rel=0.03)


def test_the_demo_ends_with_a_clean_verdict_and_a_report(quick_spark: SparkSession, tmp_path: Path) -> None:
    seed = 3
    print(f"seed {seed}")
    demo = Demo(tmp_path, make_workload(150, seed), lambda text, done, total: None)
    outcome = demo.run()
    steps: list[str] = []
    found = analyse(demo.url, tmp_path, tmp_path / "report.html", say=steps.append, spark=quick_spark)
    assert found.is_clean, found.verdict
    assert found.jobs == outcome.verdict.accepted
    assert found.leases == outcome.verdict.executions
    page = "".join(outline(Path(found.report).read_text("utf-8")).text)
    assert found.verdict in page
    assert "leases expired" in page
    assert steps[0] == "starting Spark"
    assert steps[-1] == "writing the report"
