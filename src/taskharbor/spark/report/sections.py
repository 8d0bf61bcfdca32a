"""Sections of the page that have charts: a title, a sentence, and figures for the templates to write down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from taskharbor.jobs import SECOND
from taskharbor.spark.report import charts
from taskharbor.spark.report.charts import HALF, WIDE, Chart, Series
from taskharbor.spark.report.data import Buckets, ReportData
from taskharbor.spark.report.formatting import MINUTE, count, duration, percent, plural, time_of

# Arrivals get a chart of their own if their peak is this many times higher, or the completions would be flat.
BURST = 4


class Figure(NamedTuple):
    """Charts below one legend. Each is drawn twice, for a page and for a phone; a legend may be for phones only."""

    draw: Sequence[Callable[[float], Chart]]
    legend: Sequence[Series] = ()
    width: float = WIDE
    legend_look: str = ""


class Section(NamedTuple):
    """A part of the page. `lede` is the sentence below the title; it also describes the charts to a screen reader."""

    title: str
    lede: str
    figures: Sequence[Figure]


def throughput(data: ReportData) -> Section:
    """Arrivals and completions over time."""
    per, unit_us = ("per second", SECOND) if data.bucket_us < MINUTE else ("per minute", MINUTE)
    factor = unit_us / data.bucket_us
    arrivals = _counts("arrivals", "arrived", data.flow.arrivals, factor)
    completions = _counts("done", "completed", data.flow.completions, factor)
    most, peak = max(data.flow.arrivals, default=0), max(data.flow.completions, default=0)
    lede, busiest = "Nothing was completed.", data.totals.busiest_minute_us
    if busiest is not None:
        at = time_of(busiest, MINUTE, data.timeline.span_us)
        lede = f"The busiest minute, {at}, had {plural(data.totals.busiest_minute_completions, 'completed job')}."
        if data.bucket_us > MINUTE:
            lede += f" The chart shows means of {duration(data.bucket_us)}."
    shown = [(202, [arrivals, completions])]
    if most > BURST * max(1, peak):
        lede += " Arrivals came in bursts and have a scale of their own."
        shown = [(82, [arrivals]), (142, [completions])]
    line_chart = partial(charts.line_chart, buckets=data.timeline, unit=per)
    figures = [Figure([partial(line_chart, tall=tall, series=series)], series) for tall, series in shown]
    return Section("Throughput", lede, figures)


def failures(data: ReportData) -> Section:
    """Failed executions, expired leases and dead jobs over time."""
    flow, executions = data.flow, data.totals.executions
    retried, expired, dead = sum(flow.retries), sum(flow.expiries), sum(flow.failures)
    if not retried + expired + dead:
        return Section("Failures", "No job failed, and no lease ran out.", [])
    lede = (
        f"{percent(retried, executions)} of {plural(executions, 'execution')} failed and were tried again; "
        f"{plural(expired, 'lease')} ran out; {plural(dead, 'job')} died."
    )
    if dead > data.totals.dead:
        lede += f" {count(data.totals.dead)} are dead now: the others were requeued since."
    series = [
        _counts("retried", "retried", flow.retries),
        _counts("expired", "leases expired", flow.expiries),
        _counts("dead", "dead", flow.failures),
    ]
    unit = f"per {_step_name(data.bucket_us)}"
    draw = partial(charts.bar_chart, tall=122, buckets=data.timeline, series=series, unit=unit)
    return Section("Failures", lede, [Figure([draw], series)])


def backlog(data: ReportData) -> Section:
    """Jobs that had not ended, by queue."""
    # Queues beyond the fifth share a colour.
    series = [Series(f"q{min(n, 5)}", one.queue, one.waiting) for n, one in enumerate(data.backlog)]
    total = data.total_backlog
    highest = max(total, default=0)
    lede = "Every job ended at once."
    if highest:
        at = data.timeline.moment(total.index(highest))
        lede = f"Counted at the end of each {_step_name(data.bucket_us)}: "
        lede += f"at most {plural(highest, 'job')} had not ended, at {at}; {count(total[-1])} in the end."
    draw = partial(charts.area_chart, tall=162, buckets=data.timeline, series=series, unit="jobs not ended")
    return Section("Backlog", lede, [Figure([draw], series, HALF)])


def waiting(data: ReportData) -> Section:
    """Percentiles of the waiting time."""
    series = [Series(name, name, getattr(data.wait, name)) for name in ("p50", "p95", "p99")]
    series = [one for one in series if any(value is not None for value in one.values)]
    lede = (
        f"From the time a job may run until it is taken: half within about {duration(data.totals.wait_p50_us)}, "
        f"95% within about {duration(data.totals.wait_p95_us)}, 99% within about {duration(data.totals.wait_p99_us)}. "
        "Percentiles of up to 100 values are interpolated; of more they are recorded values. Of more than 200 they are estimates:"
        " as a rule, what is called 99% is between 97.7% and 100%."
    )
    draw = partial(charts.percentile_chart, tall=194, buckets=data.timeline, series=series)
    return Section("Waiting time", lede, [Figure([draw], series, HALF, "narrow")])


def objectives(data: ReportData) -> Section:
    """Burn rate of each objective."""
    series = []
    for one in data.objectives:
        look = "tick" if all(rate is None or rate <= 1 for rate in one.burn) else "alarmnote"
        note = f"{count(one.bad)} of {count(one.total)} missed ({percent(one.bad, one.total)})"
        series.append(Series(look, f"{one.name} ({one.queue})", one.burn, note, limit=1))
    lede = (
        f"{sum(one.look == 'tick' for one in series)} of {plural(len(series), 'objective')} kept. "
        "At a burn rate of 1 (dashed) the allowed share of misses is used up exactly."
    )
    return Section("Objectives", lede, [_steps(_cells(data, data.objective_bucket_us, series), series)])


def run_time(data: ReportData) -> Section:
    """Percentiles of the run time, by type."""
    slowest = max(data.run_times, key=lambda one: one.run_p95_us)
    lede = (
        "Median, 95th and 99th percentile of the time a lease was held, by type. "
        f"The slowest is {slowest.type}: one in twenty took about {duration(slowest.run_p95_us)} or more."
    )
    return Section("Run time", lede, [Figure([partial(charts.range_chart, times=data.run_times)])])


def concurrency(data: ReportData) -> Section:
    """Leases held at once in each queue, against its limit."""
    series = []
    for one in data.concurrency:
        highest = max(one.running, default=0)
        note = f"at most {highest:.2g}" if highest < 10 else f"at most {count(highest)}"
        allowed = "" if one.limit is None else f" of {one.limit} allowed"
        series.append(Series("tick", one.queue, one.running, note + allowed, one.limit))
    lede = f"Jobs running at once in each queue, as a mean per {_step_name(data.bucket_us)}; dashed is its limit."
    return Section("Concurrency", lede, [_steps(data.timeline, series)])


def workers(data: ReportData) -> Section:
    """Leases held at once by each worker."""
    series = [Series("", one.worker, one.load, plural(one.executions, "execution")) for one in data.workers]
    lede = "How many jobs each worker held at once, on average."
    if (left_out := data.totals.workers - len(series)) > 0:
        lede += f" The busiest {len(series)}; {plural(left_out, 'other')} are left out."
    cells = _cells(data, data.worker_bucket_us, series)
    draw = partial(charts.heat_chart, buckets=cells, series=series, unit="jobs at once")
    return Section("Workers", lede, [Figure([draw])])


def _steps(buckets: Buckets, series: Sequence[Series]) -> Figure:
    step_chart = partial(charts.step_chart, buckets=buckets)
    return Figure([partial(step_chart, series=one, is_last=one is series[-1]) for one in series])


def _cells(data: ReportData, step: int, series: Sequence[Series]) -> Buckets:
    return Buckets(data.start_us // step * step, step, len(series[0].values))


def _counts(look: str, name: str, counts: Sequence[int], factor: float = 1) -> Series:
    return Series(look, name, [value * factor for value in counts], f"{name}: {count(sum(counts))}")


def _step_name(micros: int) -> str:
    text = duration(micros)
    return {"60 s": "minute", "1 s": "second", "60 min": "hour", "24 h": "day"}.get(text, text)
