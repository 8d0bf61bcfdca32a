"""`taskharbor demo`: what the queue promises, shown on a killed worker; then proved from its log, where Spark can run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from taskharbor.cli.options import Settings, flag, option, shared_options
from taskharbor.cli.output import SHORT_STATES, STATE_STYLES, console, duration_text, emit, progress, rounded
from taskharbor.cli.problems import FAILED
from taskharbor.jobs import SECOND, JobState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from taskharbor.demo.analysis import Analysis
    from taskharbor.demo.run import DemoOutcome, DemoProgress


@click.command()
@option("--jobs", click.IntRange(min=100), "How many jobs.", 3000)
@option("--seed", int, "The mix of jobs depends on it.", 1)
@flag("--keep", "Keep the database, the lake and the logs to look at.")
@option(
    "--report", click.Path(dir_okay=False, path_type=Path), "Where the report goes.", "taskharbor-demo.html"
)
@flag("--queue-only", "No pipeline, audit and report afterwards.")
@shared_options
def demo(settings: Settings, jobs: int, seed: int, keep: bool, report: Path, queue_only: bool) -> int:
    """Kill a worker in the middle of thousands of jobs; lose nothing.

    Then, where PySpark and Java are there, audit every lease and draw a report.
    """
    from taskharbor.demo.analysis import analyse, missing
    from taskharbor.demo.run import Demo
    from taskharbor.demo.workload import make_workload

    folder = Path(tempfile.mkdtemp(prefix="taskharbor-demo-"))
    well = False
    try:
        if not settings.json:
            click.echo(f"{jobs:,} jobs of 8 types, two worker processes; one of them will be killed.")
            click.echo(f"The queue is an SQLite file in {folder}")
        with _display(settings) as show:
            run = Demo(folder, make_workload(jobs, seed), show)
            outcome = run.run()
        if not settings.json:
            console().print(_summary(outcome))
        lacking = missing() if outcome.well and not queue_only else None
        analysis = None
        if outcome.well and not queue_only and lacking is None:
            with progress(settings) as say:
                analysis = analyse(run.url, folder, report, say=say)
        well = outcome.well and (analysis is None or analysis.is_clean)
        kept = keep or not well
        if settings.json:
            emit(_document(outcome, analysis, lacking=lacking, seed=seed, database=run.url, kept=kept))
        else:
            if analysis is not None:
                console().print(_proof(analysis))
            if lacking is not None:
                click.echo(lacking)
            console().print(_next_steps(run.url if kept else None))
    except KeyboardInterrupt:
        well = True  # Nothing to look into: somebody had seen enough.
        raise
    finally:
        if keep or not well:
            click.echo(f"kept: {folder} (database and the workers' logs)", err=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if well else FAILED


def _document(
    outcome: DemoOutcome, analysis: Analysis | None, *, lacking: str | None, **more: Any
) -> dict[str, Any]:
    kill = outcome.kill
    killed = None
    if kill is not None:
        killed = {
            "worker": kill.worker,
            "after_seconds": kill.after,
            "held": len(kill.held),
            "recovered": outcome.recovered,
            "recovered_after_seconds": outcome.recovered_after_us / SECOND,
        }
    audit = analysis and {"clean": analysis.is_clean, **msgspec.structs.asdict(analysis)}
    numbers = {"killed": killed, "requests": outcome.requests, "seconds": outcome.seconds}
    verdict = {**msgspec.structs.asdict(outcome.verdict), "well": outcome.well}
    return {**verdict, **rounded(numbers), **more, "audit": audit, "lacking": lacking}


# -- while it runs ------------------------------------------------------------------------------------------


@contextmanager
def _display(settings: Settings) -> Iterator[Callable[[DemoProgress], None]]:
    """A bar and the states on a terminal, one line per step elsewhere, nothing with --json into a pipe."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield (lambda progress: None) if settings.json else _Lines()
        return
    from rich.live import Live

    with Live(console=screen, auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(_picture(progress, screen.width), refresh=True)


class _Lines:
    """For logs: a line when something else begins, and at every quarter."""

    def __init__(self) -> None:
        self._said: set[tuple[str, int]] = set()

    def __call__(self, progress: DemoProgress) -> None:
        quarter = 4 * progress.ended // max(1, progress.accepted)
        if (progress.doing, quarter) not in self._said:
            self._said.add((progress.doing, quarter))
            click.echo(f"{progress.doing}: {progress.ended} of {progress.accepted} jobs ended", err=True)


def _picture(progress: DemoProgress, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble(
        (progress.doing, "bold"), f"  {progress.ended:,} of {progress.accepted:,} jobs ended"
    )
    bar = ProgressBar(max(1, progress.accepted), progress.ended, width=min(60, width - 2))
    states = Text()
    for state in JobState:
        count = progress.counts.get(state, 0)
        states.append(f"{SHORT_STATES[state] if width < 100 else state} ", "bright_black")
        states.append(f"{count:,}".ljust(6), STATE_STYLES[state] if count else "bright_black")
    picture = Table.grid()
    for line in (head, bar, states):
        picture.add_row(line)
    return picture


# -- afterwards -----------------------------------------------------------------------------------------------


def _summary(outcome: DemoOutcome) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    verdict = outcome.verdict
    ended = verdict.done + verdict.dead + verdict.cancelled
    if outcome.well:
        headline = Text(
            f"{verdict.accepted:,} jobs accepted, {ended:,} ended, each exactly once.", "bold green"
        )
    else:
        headline = Text("Something went wrong: see the numbers in red.", "bold red")
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(justify="right", no_wrap=True)
    numbers.add_column(no_wrap=True)
    numbers.add_column(style="bright_black")
    joined = outcome.requests - verdict.accepted
    numbers.add_row(
        f"{outcome.requests:,}", "requests", f"{joined:,} of them joined a waiting job of the same key"
    )
    numbers.add_row(f"{verdict.done:,}", "done", f"{verdict.retried:,} failures on the way were tried again")
    numbers.add_row(f"{verdict.dead:,}", "dead", "meant to fail; kept as dead letters with their reason")
    numbers.add_row(f"{verdict.cancelled:,}", "cancelled", "by us, or merged into a job with the same key")
    faults = (
        (verdict.lost, "lost", "accepted, but without an end"),
        (verdict.doubled, "doubled", "ended more than once"),
        (verdict.unexpected + verdict.unlogged, "unexpected", "ended otherwise than meant"),
        (verdict.overlapping_leases, "shared", "held by two workers at the same time"),
    )
    for count, word, meaning in faults:
        numbers.add_row(Text(f"{count:,}", "bold red" if count else "green"), word, meaning)
    over = verdict.w_max_overlap > verdict.w_limit
    numbers.add_row(
        Text(f"{verdict.w_max_overlap}", "bold red" if over else "green"),
        "at once",
        f"at most, in the queue that allows {verdict.w_limit}",
    )
    return Panel(
        Group(headline, Text(), numbers, Text(), Text(_story(outcome))),
        title=f"TaskHarbor demo, {outcome.seconds:.0f} s",
        title_align="left",
        border_style="green" if outcome.well else "red",
        padding=(1, 2),
        width=min(88, console().width),
    )


def _proof(analysis: Analysis) -> RenderableType:
    from rich.text import Text

    text = Text(analysis.verdict, "bold green" if analysis.is_clean else "bold red")
    text.append(f"  (pipeline and audit, {analysis.seconds:.0f} s)\n", "not bold bright_black")
    text.append(f"Report: {analysis.report}\n", "not bold default")
    return text


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
    if database is None:
        lines = [(f"{name} demo --keep", "the same, and keep the database to look around in")]
    else:
        lines = [
            (f"export TASKHARBOR_URL={database}", ""),
            (f"{name} stats", "the queues"),
            (f"{name} dlq list", "what died, and why"),
            (f"{name} list --type fetch_page", f"then: {name} inspect ID, for a job's timeline"),
        ]
    lines.append((f"{name} worker --help", "run your own jobs"))
    text = Text("Next:", "bold")
    for command, meaning in lines:
        text.append(f"\n  {command:<36}", "cyan")
        text.append(f"  {meaning}" if meaning else "", "bright_black")
    return text


def _command_name() -> str:
    """How to call us from where the reader stands: `make demo` runs a script that is not on the PATH."""
    if shutil.which("taskharbor") is not None:
        return "taskharbor"
    script = Path(sys.argv[0])
    if script.name != "taskharbor":
        return f"{sys.executable} -m taskharbor"
    return min(os.path.relpath(script), str(script.absolute()), key=len)
