"""`taskharbor demo`: shows the queue's guarantees with a killed worker, and checks them from its log if Spark can run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from taskharbor.cli.errors import FAILED
from taskharbor.cli.options import FILE, Invocation, command, flag, option
from taskharbor.cli.output import cell, console, duration_text, emit, progress, rounded
from taskharbor.jobs import SECOND

if TYPE_CHECKING:
    from rich.console import RenderableType

    from taskharbor.demo.run import DemoOutcome


@command(has_store=False)
@option("--jobs", click.IntRange(min=100), "How many jobs.", 3000)
@option("--seed", int, "The mix of jobs depends on it.", 1)
@flag("--keep", "Keep the database, the lake and the logs to look at.")
@option("--report", FILE, "Where the report goes.", "taskharbor-demo.html")
@flag("--queue-only", "No pipeline, audit and report afterwards.")
def demo(settings: Invocation, jobs: int, seed: int, keep: bool, report: Path, queue_only: bool) -> int:
    """Kill a worker in the middle of thousands of jobs; lose nothing.

    Then, where PySpark and Java are there, audit every lease and draw a report.
    """
    from taskharbor.demo.analysis import analyse, missing
    from taskharbor.demo.run import Demo, make_workload

    folder = Path(tempfile.mkdtemp(prefix="taskharbor-demo-"))
    kept = True
    try:
        _say(settings, f"{jobs:,} jobs of 8 types, two worker processes; one of them will be killed.")
        _say(settings, f"The queue is an SQLite file in {folder}")
        with progress(settings) as show:
            run = Demo(folder, make_workload(jobs, seed), show)
            outcome = run.run()
        _say(settings, _summary(outcome))
        analysis = lacking = None
        if outcome.well and not queue_only:
            lacking = missing()
            if lacking is None:
                with progress(settings) as say:
                    analysis = analyse(run.url, folder, report, say=say)
        well = outcome.well and (analysis is None or analysis.is_clean)
        kept = keep or not well
        if settings.json:
            audit = analysis and {"clean": analysis.is_clean, **msgspec.structs.asdict(analysis)}
            document = {"seed": seed, "database": run.url, "kept": kept, "lacking": lacking, "audit": audit}
            emit({**_document(outcome), **document})
        if analysis is not None:
            style = "bold green" if analysis.is_clean else "bold red"
            _say(settings, cell(f"{analysis.verdict}  (pipeline and audit, {analysis.seconds:.0f} s)", style))
            _say(settings, f"Report: {analysis.report}\n")
        if lacking is not None:
            _say(settings, lacking)
        _say(settings, _next_steps(run.url if kept else None))
    except KeyboardInterrupt:
        kept = keep  # Nothing to look into: somebody had seen enough.
        raise
    finally:
        if kept:
            click.echo(f"kept: {folder} (database and the workers' logs)", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if well else FAILED


def _say(settings: Invocation, text: RenderableType) -> None:
    if not settings.json:
        console().print(text, soft_wrap=isinstance(text, str))


def _document(outcome: DemoOutcome) -> dict[str, Any]:
    kill = outcome.kill
    killed = kill and {
        "worker": kill.worker,
        "after_seconds": kill.after,
        "held": len(kill.held),
        "recovered": outcome.recovered,
        "recovered_after_seconds": outcome.recovered_after_us / SECOND,
    }
    numbers = {"killed": killed, "requests": outcome.requests, "seconds": outcome.seconds}
    return {**msgspec.structs.asdict(outcome.verdict), "well": outcome.well, **rounded(numbers)}


# -- afterwards -----------------------------------------------------------------------------------------------


def _summary(outcome: DemoOutcome) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    verdict = outcome.verdict
    ended = verdict.done + verdict.dead + verdict.cancelled
    unexpected, shared = verdict.unexpected + verdict.unlogged, verdict.overlapping_leases
    most, limit = verdict.w_max_overlap, verdict.w_limit
    headline = Text("Something went wrong: see the numbers in red.", "bold red")
    if outcome.well:
        told = f"{verdict.accepted:,} jobs accepted, {ended:,} ended, each exactly once."
        headline = Text(told, "bold green")
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(justify="right", no_wrap=True)
    numbers.add_column(no_wrap=True)
    numbers.add_column(style="bright_black")
    joined = outcome.requests - verdict.accepted
    rows: tuple[tuple[int, bool | None, str, str], ...] = (
        (outcome.requests, None, "requests", f"{joined:,} of them joined a waiting job of the same key"),
        (verdict.done, None, "done", f"{verdict.retried:,} failures on the way were tried again"),
        (verdict.dead, None, "dead", "meant to fail; kept as dead letters with their reason"),
        (verdict.cancelled, None, "cancelled", "by us, or merged into a job with the same key"),
        (verdict.lost, verdict.lost > 0, "lost", "accepted, but without an end"),
        (verdict.doubled, verdict.doubled > 0, "doubled", "ended more than once"),
        (unexpected, unexpected > 0, "unexpected", "ended otherwise than meant"),
        (shared, shared > 0, "shared", "held by two workers at the same time"),
        (most, most > limit, "at once", f"at most, in the queue that allows {limit}"),
    )
    for count, is_fault, word, meaning in rows:
        style = {None: "", True: "bold red", False: "green"}[is_fault]
        numbers.add_row(Text(f"{count:,}", style), word, meaning)
    return Panel(
        Group(headline, Text(), numbers, Text(), Text(_story(outcome))),
        title=f"TaskHarbor demo, {outcome.seconds:.0f} s",
        title_align="left",
        border_style="green" if outcome.well else "red",
        padding=(1, 2),
        width=min(88, console().width),
    )


def _story(outcome: DemoOutcome) -> str:
    kill = outcome.kill
    if kill is None:
        return "No worker could be caught with jobs in its hands, so none was killed: try with more --jobs."
    from taskharbor.demo.run import LEASE, WORKERS

    (survivor,) = (name for name in WORKERS if name != kill.worker)
    return (
        f"{kill.worker} (pid {kill.pid}) was killed with SIGKILL {kill.after:.1f} s into the work, after "
        f"{kill.ended:,} jobs, while it held {len(kill.held)} more. Nobody told the queue. Their leases of {LEASE:g} s ran "
        f"out, and {survivor} took up {outcome.recovered} of {len(kill.held)}, the last one "
        f"{duration_text(outcome.recovered_after_us)} after the kill ({outcome.verdict.expired} leases expired in all). "
        "Those jobs may have begun twice; they ended once."
    )


def _next_steps(database: str | None) -> RenderableType:
    from rich.text import Text

    name = _command_name()
    lines = [(f"{name} demo --keep", "the same, and keep the database to look around in")]
    if database is not None:
        lines = [
            (f"export TASKHARBOR_URL={database}", ""),
            (f"{name} stats", "the queues"),
            (f"{name} dlq list", "what died, and why"),
            (f"{name} list --type fetch_page", f"then: {name} inspect ID, for a job's timeline"),
        ]
    text = Text("Next:", "bold")
    for line, meaning in (*lines, (f"{name} worker --help", "run your own jobs")):
        text.append(f"\n  {line:<36}", "cyan")
        text.append(f"  {meaning}", "bright_black")
    return text


def _command_name() -> str:
    """Return the command for the reader to type. `make demo` runs a script that is not on the PATH."""
    if shutil.which("taskharbor") is not None:
        return "taskharbor"
    script = Path(sys.argv[0])
    if script.name != "taskharbor":
        return f"{sys.executable} -m taskharbor"
    return min(os.path.relpath(script), str(script.absolute()), key=len)
