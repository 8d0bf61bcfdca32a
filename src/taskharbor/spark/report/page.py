"""The whole page: a pure function from numbers to HTML, with nothing in it that would need the network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from string import Template

from taskharbor.spark.report import sections, tables
from taskharbor.spark.report.data import ReportData
from taskharbor.spark.report.wording import escaped, span_text

_FILES = files("taskharbor.spark.report")


def render(data: ReportData) -> str:
    """One self-contained HTML file."""
    heading = _heading(data.sources)
    template = Template(_FILES.joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=escaped(f"TaskHarbor: {heading}"),
        heading=escaped(heading),
        span=escaped(span_text(data.start_us, data.end_us)) if data.buckets else "",
        sources=escaped(", ".join(one for one in data.sources if one != heading)),
        style=_FILES.joinpath("style.css").read_text("utf-8"),
        sections="\n".join(_sections(data)),
        footer=tables.footer(data),
    )


def _heading(sources: Sequence[str]) -> str:
    """A store by the last part of its URL; the whole is said below."""
    if len(sources) == 1:
        return sources[0].partition("?")[0].rstrip("/").rpartition("/")[2] or sources[0]
    return f"{len(sources)} stores" if sources else "Report"


def _sections(data: ReportData) -> list[str]:
    if data.is_empty:
        return ['<section><h2>Nothing yet</h2><p class="lede">The attempt log has no rows.</p></section>']
    return [
        tables.verdict(data.verdict),
        tables.key_numbers(data),
        sections.throughput(data),
        sections.trouble(data),
        sections.pair(sections.backlog(data), sections.waiting(data)),
        sections.objectives(data),
        sections.run_times(data),
        sections.concurrency(data),
        sections.workers(data),
        tables.errors(data),
        sections.outcomes(data),
        tables.jobs(
            "Slowest jobs",
            "From when a job might first run until it ended. Waited is all of that in which it did not run.",
            data.slowest,
        ),
        tables.jobs("Most often tried", "The jobs that were taken most often.", data.most_tried),
    ]
