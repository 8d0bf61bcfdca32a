"""`taskharbor spark-worker`: run an app's jobs on the executors of a Spark cluster, or on this machine's local one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from taskharbor.cli.apps import put_current_folder_first
from taskharbor.cli.options import COUNT, Settings, chosen_options, shared_options, worker_options
from taskharbor.cli.output import Column, answer, cell, console, count_text, emit, fields_of, rounded, table
from taskharbor.cli.problems import BadInput
from taskharbor.cli.store import require_store

if TYPE_CHECKING:
    from rich.text import Text

    from taskharbor.spark.workers import DrainSummary, Progress

LINE_EVERY = 5.0
"""Seconds between lines of progress where nobody looks at a terminal."""


@click.command(
    "spark-worker",
    epilog="One worker per task slot, each a Spark job of its own: a lost executor takes only its own down, and that one is "
    "started again. Bounds count for each worker, except --max-seconds. Ctrl-C: running jobs are finished; a second one: "
    "the tasks are cancelled, and jobs run again when their leases expire.",
)
@click.argument("app", metavar="MODULE[:APP]", required=False)
@click.option("--workers", "-n", type=COUNT, help="How many.  [default: one per task slot]")
@worker_options
@click.option(
    "--master", metavar="URL", help="local[4], spark://host:7077, ...  [default: local[*], or spark-submit's]"
)
@click.option("--conf", "confs", multiple=True, metavar="KEY=VALUE", help="A Spark setting; repeat.")
@click.option(
    "--py-files", multiple=True, metavar="FILE", help="Ship this .py, .zip or .egg to the executors; repeat."
)
@click.option(
    "--stop",
    "stopped_run",
    metavar="RUN",
    help="Stop a run, from anywhere: its name is shown when it starts.",
)
@shared_options
def spark_worker(settings: Settings, /, app: str | None, **options: Any) -> None:
    """Run jobs of the app that MODULE:APP names, inside Spark tasks."""
    if options["stopped_run"]:
        _stop(settings, options["stopped_run"])
        return
    if app is None:
        raise BadInput("which app?", hint="name it like jobs:harbor")
    # Spark is an extra, and takes a second to import: not before somebody asks for it.
    from taskharbor.spark.session import local_session
    from taskharbor.spark.workers import run_on_executors

    put_current_folder_first()
    confs = dict(_pair(one) for one in options["confs"])
    spark = local_session("taskharbor spark-worker", master=options["master"], settings=confs)
    try:
        for file in options["py_files"]:
            spark.sparkContext.addPyFile(file)
        with _shown(settings) as shown:
            summary = run_on_executors(
                spark,
                app,
                None if settings.url_is_default else settings.url,
                workers=options["workers"],
                started=None if shown is None else shown.started,
                progress=None if shown is None else shown.progress,
                **chosen_options(options),
            )
    finally:
        spark.stop()
    show_summary(settings, summary)


def _stop(settings: Settings, run: str) -> None:
    from taskharbor.spark.workers.stopping import ask_to_stop

    require_store(settings)
    ask_to_stop(settings.url, run)
    answer(settings, {"run": run, "asked_to_stop": True}, f"run {run} was asked to stop")


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise BadInput(f"--conf {text}: write it like spark.executor.memory=1g")
    return key, value


# -- what is shown ----------------------------------------------------------------------------------------------------


class _Lines:
    """For logs and pipes: a line now and then, on stderr."""

    def __init__(self) -> None:
        self._next = 0.0

    def started(self, run: str, workers: int) -> None:
        click.echo(f"run {run}: {workers} workers", err=True)

    def progress(self, now: Progress) -> None:
        if now.seconds >= self._next:
            self._next = now.seconds + LINE_EVERY
            click.echo(_line(now), err=True)


class _Status:
    """For a terminal: one line that changes."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def started(self, run: str, workers: int) -> None:
        click.secho(f"run {run} · {workers} workers · Ctrl-C stops gracefully", fg="cyan", err=True)

    def progress(self, now: Progress) -> None:
        self._status.update(_line(now))


@contextmanager
def _shown(settings: Settings) -> Iterator[_Lines | _Status | None]:
    if settings.json:
        yield None
    elif sys.stderr.isatty():
        with console(stderr=True).status("starting the workers") as status:
            yield _Status(status)
    else:
        yield _Lines()


def _line(now: Progress) -> str:
    pace = now.ended / now.seconds if now.seconds > 0 else 0.0
    parts = [
        f"{now.seconds:.0f} s",
        f"{count_text(now.ended)} ended",
        f"{pace:.0f}/s",
        f"{count_text(now.waiting)} waiting",
        f"{count_text(now.inflight)} running",
        f"{now.workers} workers",
    ]
    return " · ".join([*parts, "stopping"] if now.stopping else parts)


def show_summary(settings: Settings, summary: DrainSummary) -> None:
    if settings.json:
        emit(_document(summary))
        return
    screen = console()
    columns = (
        Column("worker", lambda one: str(one.number), right=True, footer="all"),
        Column("host", lambda one: cell(one.host or "lost", "" if one.host else "red"), shrinks=1),
        Column("done", lambda one: count_text(one.done), right=True, footer=count_text(summary.done)),
        Column("failed", lambda one: _fault(one.failed), right=True, footer=count_text(summary.failed)),
        Column("lost", lambda one: _fault(one.lost), right=True, footer=count_text(summary.lost)),
        Column("seconds", lambda one: f"{one.seconds:.1f}", right=True, footer=f"{summary.seconds:.1f}"),
    )
    screen.print(table(screen, columns, summary.workers))
    screen.print(cell(f"{count_text(summary.ended)} jobs ended meanwhile, by the store's count"))
    if summary.cancelled:
        screen.print(
            cell("some tasks were cancelled: their jobs run again when their leases expire", "yellow")
        )


def _fault(count: int) -> Text:
    return cell(count_text(count), "red" if count else "bright_black")


def _document(summary: DrainSummary) -> dict[str, Any]:
    names = "number name host done failed outcomes seconds submitted lost"
    workers = [rounded(fields_of(worker, names)) for worker in summary.workers]
    whole = rounded(fields_of(summary, "run done failed ended lost seconds stopped cancelled"))
    return {**whole, "workers": workers}
