"""The second half of the demo: pipeline, audit and report over the store of the first half.

Spark is imported on demand. Without PySpark or Java the demo has only its first half, and prints one more line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from taskharbor.errors import TaskHarborError

if TYPE_CHECKING:
    from taskharbor.spark.session import Session

LOG = "spark.log"
# A few thousand rows: compiling the queries would take longer than running them as they are.
SMALL = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


class AnalysisFailed(TaskHarborError):
    """Spark is installed, but failed."""


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of the audit, and the path of the report."""

    report: str
    """The path of the page."""
    leases: int
    jobs: int
    violations: dict[str, int]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """True if no guarantee was broken."""
        return not self.violations

    @property
    def verdict(self) -> str:
        """The findings in one sentence."""
        checked = f"{self.leases:,} leases of {self.jobs:,} jobs"
        if self.is_clean:
            return f"No violation in {checked}."
        found = ", ".join(f"{number:,} {kind}" for kind, number in self.violations.items())
        return f"Violations in {checked}: {found}."


def missing() -> str | None:
    """Return one line with the packages to install for this half of the demo; None if all are there."""
    from taskharbor.spark.session import SparkUnavailable, check

    try:
        check()
    except SparkUnavailable as error:
        return f"For the pipeline, the audit and the report: {error}"
    return None


def analyse(
    url: str, folder: Path, report: Path, *, say: Callable[[str], None], spark: Session | None = None
) -> Analysis:
    """Pipeline, audit and report over the store, with the lake and Spark's log in `folder`.

    A session that is given is used and left running; otherwise one is started for this and stopped.
    """
    began = time.monotonic()
    say("starting Spark")
    try:
        from taskharbor.spark.audit import audit_lake
        from taskharbor.spark.lake import Lake, run_pipeline
        from taskharbor.spark.report import collect, write_page
        from taskharbor.spark.session import local_session

        with _errors_into(folder / LOG):
            session = spark or local_session("taskharbor demo", settings=SMALL, archive=True)
        try:
            lake = Lake(folder / "lake")
            run_pipeline(session, lake, url, progress=lambda step, number, steps: say(f"pipeline: {step}"))
            say("auditing every lease")
            snapshot = lake.snapshot()
            audit = audit_lake(session, snapshot)
            say("counting for the report")
            data = collect(session, snapshot, audit=audit)
        finally:
            if spark is None:
                session.stop()
        say("writing the report")
        page = write_page(data, report)
    except Exception as error:
        if isinstance(error, TaskHarborError):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise AnalysisFailed(f"the pipeline did not get to its end: {reason} (see {folder / LOG})") from error
    verdict = data.verdict
    assert verdict is not None
    return Analysis(
        report=str(page),
        leases=verdict.leases,
        jobs=verdict.jobs,
        violations=verdict.kinds,
        seconds=time.monotonic() - began,
    )


@contextmanager
def _errors_into(log: Path) -> Iterator[None]:
    """Send the stderr of Spark to a file. Java keeps the stderr that it was started with, and would write between the demo's
    lines."""
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)
