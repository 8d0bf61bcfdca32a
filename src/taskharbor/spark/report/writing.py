"""The report as a file: collect, render, and put it there in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from taskharbor.spark.audit import audit_lake
from taskharbor.spark.report.collect import collect
from taskharbor.spark.report.page import render

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from taskharbor.spark.audit import AuditResult
    from taskharbor.spark.lake.layout import Lake
    from taskharbor.spark.report.data import ReportData


def write_report(
    spark: SparkSession, lake: Lake, path: str | Path, *, audit: AuditResult | None = None
) -> Path:
    """Write the page and say where it is. The audit is made here unless its result is given."""
    found = audit_lake(spark, lake) if audit is None else audit
    return write_page(collect(spark, lake, audit=found), path)


def write_page(data: ReportData, path: str | Path) -> Path:
    """Whoever reloads the page while it is written sees the old one or the new one, never half of one."""
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(render(data), "utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return target
