"""Writes the page: one HTML file that needs no network and no script.

The templates escape every value that they write. `visible` replaces control characters before that.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from pyspark.sql import SparkSession

from taskharbor.lake.delta import Lake
from taskharbor.spark.audit import AuditResult, audit_lake
from taskharbor.spark.report import charts, formatting, sections
from taskharbor.spark.report.collect import collect
from taskharbor.spark.report.data import ReportData


def write_report(
    spark: SparkSession, lake: Lake, path: str | Path, *, audit: AuditResult | None = None
) -> Path:
    """Collect the numbers and write the page. Audits first unless the result of an audit is given."""
    snapshot = lake.snapshot()
    return write_page(collect(spark, snapshot, audit=audit or audit_lake(spark, snapshot)), path)


def write_page(data: ReportData, path: str | Path) -> Path:
    """Replace the page in one step, so that a reader sees the old page or the new one and never a part."""
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    # It has a name that nobody can foresee, and only its owner can read it: the page shows errors and names of jobs.
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    unfinished = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(render(data))
        if target.exists():
            shutil.copymode(target, unfinished)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def render(data: ReportData) -> str:
    """The page as HTML."""
    sources = data.sources
    heading = f"{len(sources)} stores" if sources else "Report"
    if len(sources) == 1:
        # The last part of the URL; the page has the whole URL below it.
        heading = sources[0].partition("?")[0].rstrip("/").rpartition("/")[2] or sources[0]
    return _templates().get_template("page.html.j2").render(data=data, heading=heading)


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("taskharbor.spark.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        # Only text is made visible: Markup is what a macro wrote, and its values passed here before.
        finalize=lambda value: formatting.visible(value) if type(value) is str else value,
    )
    environment.globals.update(sections=sections, NARROW=charts.NARROW, percent=formatting.percent)
    for name in ("count", "duration", "moment", "plural", "shortened", "unbroken", "time_of", "span_text"):
        environment.filters[name] = getattr(formatting, name)
    return environment
