"""The parts of the page that are plots, in the order in which somebody on call wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskharbor.jobs import SECOND
from taskharbor.spark.report.bars import Part, Range, divided_bar, ranges_plot
from taskharbor.spark.report.data import Objective, ReportData
from taskharbor.spark.report.frame import TimeAxis
from taskharbor.spark.report.plots import (
    Line,
    Strip,
    heat_strips,
    lines_plot,
    percentiles_plot,
    stacked_areas,
    stacked_bars,
    step_strips,
)
from taskharbor.spark.report.svg import Drawing
from taskharbor.spark.report.wording import (
    MINUTE,
    count,
    duration,
    escaped,
    in_lines,
    percent,
    plural,
    short_count,
    time_of,
)

WIDE, HALF, NARROW = 1000, 474, 350
"""Pixels of a drawing across the page, across half of it, and on a phone."""
QUEUE_LOOKS = ("q0", "q1", "q2", "q3", "q4")
OTHER_LOOK = "q5"
LEASE_LOOKS = {
    "done": "done",
    "retried": "retried",
    "expired": "expired",
    "dead": "dead",
    "released": "open",
    "cancelled": "quiet",
}
JOB_LOOKS = {"done": "done", "dead": "dead", "cancelled": "quiet", "open": "open"}
BURST = 4
"""Arrivals that peak this many times higher than completions get a plot of their own, or one would not see the rest."""


def section(title: str, lede: str, *drawings: Callable[[int], Drawing], width: int = WIDE) -> str:
    """Each drawing is made twice: for the page, and for a phone."""
    figures = "".join(
        f"<figure>{draw(width).as_html('wide')}{draw(NARROW).as_html('narrow')}</figure>" for draw in drawings
    )
    return (
        f'<section><h2>{escaped(title)}</h2><p class="lede">{escaped(in_lines(lede))}</p>{figures}</section>'
    )


def pair(*sections: str) -> str:
    """Two beside each other where there is room; one alone takes the width it has."""
    filled = [one for one in sections if one]
    return f'<div class="pair">{"".join(filled)}</div>' if filled else ""


def throughput(data: ReportData) -> str:
    flow, axis = data.flow, time_axis(data)
    per, unit_us = ("per second", SECOND) if data.bucket_us < MINUTE else ("per minute", MINUTE)
    factor = unit_us / data.bucket_us

    def rates(values: Sequence[int]) -> list[float | None]:
        return [value * factor for value in values]

    arrivals = Line(
        "arrivals", "arrived", rates(flow.arrivals), f"arrived: {count(sum(flow.arrivals))}", filled=True
    )
    done = Line(
        "done",
        "completed",
        rates(flow.completions),
        f"completed: {count(sum(flow.completions))}",
        filled=True,
    )
    peak = max(flow.completions, default=0)
    lede = "Nothing was completed."
    if peak:
        at = moment(data, flow.completions.index(peak))
        lede = f"The peak was {short_count(peak * factor)} completed jobs {per}, at {at}."
    is_burst = max(flow.arrivals, default=0) > BURST * max(1, peak)

    def plot(lines: list[Line], height: int, words: str) -> Callable[[int], Drawing]:
        return lambda width: lines_plot(width, height, axis, lines, unit=per, description=words)

    if is_burst:
        lede += " Arrivals came in bursts and have a scale of their own."
        drawings = [
            plot([arrivals], 150, f"Arrivals over time. {lede}"),
            plot([done], 210, f"Completions over time. {lede}"),
        ]
    else:
        both = [arrivals._replace(filled=False), done]
        drawings = [plot(both, 270, f"Arrivals and completions over time. {lede}")]
    return section("Throughput", lede, *drawings)


def trouble(data: ReportData) -> str:
    flow = data.flow
    lines = [
        Line(look, name, values, f"{name}: {count(sum(values))}")
        for look, name, values in (
            ("retried", "retried", flow.retries),
            ("expired", "leases expired", flow.expiries),
            ("dead", "dead", flow.failures),
        )
    ]
    retried, expired, dead = (sum(line.values[i] or 0 for i in range(len(line.values))) for line in lines)
    if not retried + expired + dead:
        return section("Failures", "No job failed, and no lease ran out.")
    lede = (
        f"{percent(retried, data.totals.executions)} of {plural(data.totals.executions, 'execution')} failed and "
        f"were tried again; {plural(round(expired), 'lease')} ran out; {plural(round(dead), 'job')} died."
    )
    step = f"per {_step_name(data.bucket_us)}"
    return section(
        "Failures",
        lede,
        lambda width: stacked_bars(
            width, 190, time_axis(data), lines, unit=step, description=f"Failures. {lede}"
        ),
    )


def backlog(data: ReportData) -> str:
    if not data.backlog:
        return ""
    named = data.backlog if len(data.backlog) <= len(QUEUE_LOOKS) else data.backlog[: len(QUEUE_LOOKS)]
    lines = [Line(QUEUE_LOOKS[i], one.queue, one.waiting) for i, one in enumerate(named)]
    others = data.backlog[len(named) :]
    if others:
        sums = [sum(one.waiting[i] for one in others) for i in range(data.buckets)]
        lines.append(Line(OTHER_LOOK, f"{len(others)} other queues", sums))
    total = [sum(one.waiting[i] for one in data.backlog) for i in range(data.buckets)]
    highest = max(total, default=0)
    lede = "Every job ended at once."
    if highest:
        lede = (
            f"At most {plural(round(highest), 'job')} had not ended, at {moment(data, total.index(highest))}; "
            f"{count(total[-1])} at the end."
        )
    return section(
        "Backlog",
        lede,
        lambda width: stacked_areas(
            width, 230, time_axis(data), lines, unit="jobs not ended", description=f"Backlog. {lede}"
        ),
        width=HALF,
    )


def waiting(data: ReportData) -> str:
    values = (("p50", data.wait.p50), ("p95", data.wait.p95), ("p99", data.wait.p99))
    lines = [Line(name, name, of_name) for name, of_name in values]
    if not any(value is not None for line in lines for value in line.values):
        return ""
    totals = data.totals
    lede = (
        f"From the time a job may run until it is taken: half within {duration(totals.wait_p50_us)}, "
        f"95% within {duration(totals.wait_p95_us)}."
    )
    return section(
        "Waiting time",
        lede,
        lambda width: percentiles_plot(
            width, 230, time_axis(data), lines, description=f"Waiting time. {lede}"
        ),
        width=HALF,
    )


def run_times(data: ReportData) -> str:
    if not data.run_times:
        return ""
    ranges = [
        Range(one.type, plural(one.executions, "execution"), one.p50_us, one.p95_us, one.p99_us)
        for one in data.run_times
    ]
    slowest = max(data.run_times, key=lambda one: one.p95_us)
    lede = (
        f"Median, 95th and 99th percentile of the time a lease was held, by type. The slowest is {slowest.type}: "
        f"one in twenty took {duration(slowest.p95_us)} or more."
    )
    return section(
        "Run time", lede, lambda width: ranges_plot(width, ranges, description=f"Run time by type. {lede}")
    )


def concurrency(data: ReportData) -> str:
    if not data.concurrency:
        return ""
    strips = []
    for one in data.concurrency:
        highest = max(one.running, default=0)
        note = f"at most {highest:.2g}" if highest < 10 else f"at most {count(highest)}"
        if one.limit is not None:
            note += f" of {one.limit} allowed"
        strips.append(Strip(one.queue, one.running, one.limit, note))
    lede = f"Jobs running at once in each queue, as a mean per {_step_name(data.bucket_us)}; dashed is its limit."
    return section(
        "Concurrency",
        lede,
        lambda width: step_strips(width, time_axis(data), strips, description=f"Concurrency. {lede}"),
    )


def workers(data: ReportData) -> str:
    if not data.workers:
        return ""
    step = data.worker_bucket_us
    axis = TimeAxis(data.start_us // step * step, step, len(data.workers[0].load))
    strips = [Strip(one.worker, one.load, note=plural(one.executions, "execution")) for one in data.workers]
    lede = "How many jobs each worker held at once, on average."
    if data.workers_left_out:
        lede += f" The busiest {len(strips)}; {plural(data.workers_left_out, 'other')} are left out."
    return section(
        "Workers",
        lede,
        lambda width: heat_strips(
            width, axis, strips, legend="jobs at once", description=f"Load of each worker. {lede}"
        ),
    )


def outcomes(data: ReportData) -> str:
    jobs = _parts(data.job_ends, JOB_LOOKS)
    leases = _parts(data.lease_ends, LEASE_LOOKS)
    drawings: list[Callable[[int], Drawing]] = []
    if jobs:
        drawings.append(lambda width: divided_bar(width, "Jobs", jobs, noun="job"))
    if leases:
        drawings.append(lambda width: divided_bar(width, "Leases", leases, noun="lease"))
    return section("How it ended", "Every job, and every time one was taken.", *drawings)


def objectives(data: ReportData) -> str:
    if not data.objectives:
        return ""
    met = sum(_is_met(one) for one in data.objectives)
    lede = (
        f"{met} of {plural(len(data.objectives), 'objective')} kept. At a burn rate of 1 (dashed) the allowed share of misses "
        "is used up exactly."
    )
    step = data.objective_bucket_us
    axis = TimeAxis(data.start_us // step * step, step, len(data.objectives[0].burn))
    strips = [
        Strip(
            f"{one.name} ({one.queue})",
            one.burn,
            1,
            f"{count(one.bad)} of {count(one.total)} missed ({percent(one.bad, one.total)})",
            not _is_met(one),
        )
        for one in data.objectives
    ]
    return section(
        "Objectives", lede, lambda width: step_strips(width, axis, strips, description=f"Objectives. {lede}")
    )


def _is_met(one: Objective) -> bool:
    return all(burn is None or burn <= 1 for burn in one.burn)


def _parts(numbers: dict[str, int], looks: dict[str, str]) -> list[Part]:
    """Those with a colour of their own first, in their usual order; the rest is grey."""
    known = [name for name in looks if numbers.get(name)]
    rest = [name for name, number in sorted(numbers.items()) if name not in looks and number]
    return [Part(looks.get(name, "quiet"), name, numbers[name]) for name in (*known, *rest)]


def time_axis(data: ReportData) -> TimeAxis:
    return TimeAxis(data.start_us, data.bucket_us, data.buckets)


def moment(data: ReportData, index: int) -> str:
    return time_of(data.start_us + index * data.bucket_us, data.bucket_us, data.end_us - data.start_us)


def _step_name(micros: int) -> str:
    text = duration(micros)
    return {"60 s": "minute", "1 s": "second", "60 min": "hour", "24 h": "day"}.get(text, text)
