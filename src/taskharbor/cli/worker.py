"""`taskharbor worker` and `taskharbor spark-worker`: run an app's jobs in this process, in several, or on Spark's executors."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from taskharbor.cli import options as opt
from taskharbor.cli import output as out
from taskharbor.cli.app_loading import put_current_folder_first
from taskharbor.cli.errors import BadInput, CommandFailed
from taskharbor.cli.options import Invocation, flag, option
from taskharbor.cli.output import Column, cell, count_text
from taskharbor.errors import ScheduleNotFound
from taskharbor.harbor import Harbor
from taskharbor.printable import printable

if TYPE_CHECKING:
    from rich.text import Text

    from taskharbor.spark.workers import DrainSummary, Progress
    from taskharbor.worker.health import Look
    from taskharbor.worker.worker import Worker


_LEFT_OUT = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
MOST_FILES = 5000


@contextmanager
def watched_files(folder: Path, changed: Callable[[str], None], *, interval: float = 0.5) -> Iterator[None]:
    """Look at the `.py` files under a folder every `interval` seconds, on a daemon thread, until the end of the block."""
    stopped = threading.Event()

    def watch(seen: dict[str, int]) -> None:
        while not stopped.wait(interval):
            now = modification_times(folder)
            if now != seen:
                differing = sorted(path for path, _ in now.items() ^ seen.items())
                seen = now
                changed(os.path.relpath(differing[0]))

    first = (modification_times(folder),)
    threading.Thread(target=watch, args=first, name="taskharbor-reload", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def modification_times(folder: Path) -> dict[str, int]:
    """Return the `.py` files below a folder, without those of environments and builds, and the time of each one's last change."""
    found: dict[str, int] = {}
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith(".")]
        for path in (os.path.join(here, name) for name in files if name.endswith(".py")):
            with suppress(OSError):
                found[path] = os.stat(path).st_mtime_ns
        if len(found) >= MOST_FILES:
            break
    return found


def app_folder(module: str) -> Path:
    """Return the folder of the module's topmost package (or of the module itself), without importing it."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    return Path(spec.origin).parent if spec is not None and spec.origin else Path.cwd()


log = logging.getLogger("taskharbor.worker")

REPORT_EVERY = 1.0
AFTER_GRACE = 10.0


def stop_with_parent(stop: Callable[[], None], grace: float, fd: int = 0) -> None:
    """Watch the parent's end of stdin. It closes with the parent, even if the parent was killed."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(fd, 1024):
                pass
        log.warning("the parent process is gone: stopping")
        last_resort = threading.Timer(grace + AFTER_GRACE, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        stop()

    threading.Thread(target=watch, name="taskharbor-parent", daemon=True).start()


def report_to_parent(snapshot: Callable[[], dict[str, Any]], fd: int) -> None:
    """Write a status line every second, for the health endpoint that the parent serves."""

    def tell() -> None:
        # An error: the parent is gone. `stop_with_parent` sees that too.
        with suppress(OSError), open(fd, "wb", buffering=0) as pipe:
            while True:
                pipe.write(msgspec.json.encode(snapshot()) + b"\n")
                time.sleep(REPORT_EVERY)

    threading.Thread(target=tell, name="taskharbor-report", daemon=True).start()


OFF = "off"


def name_app(settings: Invocation, references: tuple[str, ...]) -> None:
    """The first name is the app's, unless --app names it. The others are modules that declare more of its jobs."""
    if references and not settings.given_app:
        settings.given_app, references = references[0], references[1:]
    if named := [one for one in references if ":" in one]:
        hint = "leave one out; a further module is written without a colon"
        raise BadInput(f"{settings.given_app} is the app, and {named[0]!r} names another one", hint=hint)
    settings.modules = references


@opt.command(
    epilog="With --processes, a parent restarts what crashes and --health answers for all of them: ready when every "
    "process is. --max-jobs and --max-seconds count for each process. SIGTERM or Ctrl-C: running jobs are "
    "finished; a second one: at once.",
)
@click.argument("references", metavar="[MODULE[:APP]] [MODULE]...", nargs=-1)
@opt.worker_options
@flag("--every-type", "Claim jobs of every type. One that the app does not declare is dead.")
@option("--heartbeat", opt.duration, "Between renewals.  [default: a third of the lease]")
@flag("--heartbeat-process", "Renew from a process of its own while a job holds the GIL (Linux).")
@flag("--prune-schedules", "First delete schedules that the app no longer declares.")
@option("--name", "NAME", "The worker's name.  [default: host, pid, noise]")
@option("--processes", click.IntRange(1, 256), "Worker processes.", 1)
@flag("--reload/--no-reload", "Restart when a .py file of the app changes (development).", show_default=False)
@option("--health", "[HOST:]PORT", "Serve /health and /ready.  [host: 127.0.0.1]")
@flag("--health-public", "Let --health listen beyond this host.")
@opt.log_options
@option("--supervised", int, "Status pipe of the parent; stdin closes with it.", hidden=True)
def worker(settings: Invocation, /, references: tuple[str, ...], **options: Any) -> int | None:
    """Run jobs of the app that MODULE:APP names (`jobs:harbor`). More modules that declare its jobs may follow."""
    opt.set_up_logs(settings, options)
    name_app(settings, references)
    put_current_folder_first()
    if options["processes"] > 1 or options["reload"]:
        return _supervise(settings, options)
    harbor = settings.harbor
    one = harbor.worker(**opt.chosen_options(options))
    if options["prune_schedules"]:
        for gone in [
            info.name for info in harbor.client.schedules.list(app=harbor) if info.state == "orphaned"
        ]:
            with suppress(ScheduleNotFound):  # Another process may be quicker.
                harbor.client.schedules.delete(gone)
            log.info("schedule %s is deleted: the app no longer declares it", gone)
        harbor.close()
    one.is_made_by_import = True
    supervised = options["supervised"]
    if supervised is None:
        _banner(harbor, f"worker {one.name}", options, one.config.queues)
    else:
        stop_with_parent(one.stop, options["grace"].total_seconds())
        if supervised >= 0:
            report_to_parent(one.snapshot, supervised)
    with _health(options, lambda: _look(one)):
        one.run()
    return None


def _look(one: Worker) -> tuple[bool, dict[str, Any]]:
    snapshot = one.snapshot()
    return bool(snapshot["serving"] and snapshot["backend_answers"]), snapshot


@contextmanager
def _health(options: dict[str, Any], look: Look) -> Iterator[None]:
    """The health endpoint, if it was asked for, until the end of the block."""
    if options["health"] in (None, "", OFF):
        yield
        return
    from taskharbor.worker.health import HealthServer, parse_address

    host, port = parse_address(options["health"], public=options["health_public"])
    try:
        server = HealthServer(host, port, look)
    except OSError as error:
        said = f"cannot serve health at {host}:{port}: {error.strerror or error}"
        raise CommandFailed(said, hint="choose another port") from error
    server.start()
    log.info("health at http://%s/health and /ready", server.address)
    try:
        yield
    finally:
        server.stop()


def _supervise(settings: Invocation, options: dict[str, Any]) -> int:
    from taskharbor.worker.supervise import Supervisor

    count, reload = options["processes"], options["reload"]
    label = f"{count} worker processes" if count > 1 else "worker, reloading"
    if reload:
        # Not imported here: the parent must outlive an app that cannot be imported at the moment.
        _banner(None, label, options, options["queues"])
    else:
        harbor = settings.harbor
        if not harbor.driver().capabilities.multi_process:
            hint = "leave out --processes, or use a store like sqlite:///jobs.db"
            said = "this store lives in one process; several would not see each other's jobs"
            raise BadInput(said, hint=hint)
        harbor.worker(**opt.chosen_options(options))  # So that a bad option is said once, not once per child.
        _banner(harbor, label, options, options["queues"] or harbor.queues)
    supervisor = Supervisor(
        lambda number, fd: child_command(settings.argv, number, fd, options),
        processes=count,
        grace=options["grace"].total_seconds(),
        finite=bool(options["until_empty"] or options["max_jobs"] or options["max_seconds"]),
        reload=reload,
    )
    folder = app_folder(settings.named_app.partition(":")[0])
    watch = watched_files(folder, supervisor.changed) if reload else nullcontext()
    with watch, _health(options, supervisor.look):
        return supervisor.run()


def child_command(argv: list[str], number: int, status_fd: int, options: dict[str, Any]) -> list[str]:
    """Return the same command line without the parent's own options: of an option given twice, the last counts."""
    own = ["--processes", "1", "--no-reload", "--health", OFF, "--supervised", str(status_fd)]
    if options["name"]:
        own += ["--name", f"{options['name']}-{number}" if options["processes"] > 1 else options["name"]]
    end = argv.index("--") if "--" in argv else len(argv)
    return [sys.executable, "-m", "taskharbor", *argv[:end], *own, *argv[end:]]


def _banner(harbor: Harbor | None, label: str, options: dict[str, Any], queues: Iterable[str]) -> None:
    parts = [label]
    if queues:
        parts.append(f"queues {', '.join(queues)}")
    if harbor is not None:
        parts.append(out.plural(len(harbor.handlers), "job type"))
    out.banner(options["log_format"], [*parts, f"concurrency {options['concurrency']}"])


# -- workers on Spark's executors ---------------------------------------------------------------------------

LINE_EVERY = 5.0
"""Seconds between lines of progress without a terminal."""


@opt.command(
    "spark-worker",
    epilog="One worker per task slot, each a Spark job of its own: a lost executor takes only its own down, and that one is "
    "started again. Bounds count for each worker, except --max-seconds. Ctrl-C: running jobs are finished; a second one: "
    "the tasks are cancelled, and jobs run again when their leases expire.",
)
@click.argument("references", metavar="[MODULE[:APP]]", nargs=-1)
@option("--workers -n", opt.COUNT, "How many.  [default: one per task slot]")
@opt.worker_options
@option("--master", "URL", "local[4], spark://host:7077, ...  [default: local[*], or spark-submit's]")
@option("--conf confs", "KEY=VALUE", "A Spark setting; repeat.", multiple=True)
@option("--py-files", "FILE", "Ship this .py, .zip or .egg to the executors; repeat.", multiple=True)
@option("--stop stopped_run", "RUN", "Stop a run, from anywhere: its name is shown when it starts.")
def spark_worker(settings: Invocation, /, references: tuple[str, ...], **options: Any) -> None:
    """Run jobs of the app that MODULE:APP names, inside Spark tasks."""
    name_app(settings, references)
    # Spark is an extra, and takes a second to import: imported on demand.
    if run := options["stopped_run"]:
        from taskharbor.spark.workers.stop_mark import ask_to_stop

        opt.require_store(settings)
        ask_to_stop(settings.url, run)
        out.answer(settings, {"run": run, "asked_to_stop": True}, f"run {run} was asked to stop")
        return
    app = settings.named_app
    if settings.modules:
        hint = "Harbor(imports=[...]) names more modules"
        raise BadInput(f"{settings.modules[0]!r}: an executor imports the app alone", hint=hint)
    from taskharbor.spark.session import local_session
    from taskharbor.spark.workers import run_on_executors

    def started(run: str, workers: int) -> None:
        if not settings.json:
            click.secho(
                f"run {printable(run)}: {workers} workers; Ctrl-C stops gracefully", fg="cyan", err=True
            )

    put_current_folder_first()
    confs = opt.parse_pairs(options["confs"], "--conf", "spark.executor.memory=1g")
    spark = local_session("taskharbor spark-worker", master=options["master"], settings=confs)
    try:
        for file in options["py_files"]:
            spark.sparkContext.addPyFile(file)
        with out.progress(settings, every=LINE_EVERY) as show:
            summary = run_on_executors(
                spark,
                app,
                settings.imposed_url,
                workers=options["workers"],
                started=started,
                progress=lambda now: show(_line(now)),
                **opt.chosen_options(options),
            )
    finally:
        spark.stop()
    show_summary(settings, summary)


def _line(now: Progress) -> str:
    pace = now.ended / now.seconds if now.seconds > 0 else 0.0
    ended, waiting, running = map(count_text, (now.ended, now.waiting, now.inflight))
    text = f"{now.seconds:.0f} s · {ended} ended · {pace:.0f}/s · {waiting} waiting · {running} running"
    return f"{text} · {now.workers} workers{' · stopping' if now.stopping else ''}"


def show_summary(settings: Invocation, summary: DrainSummary) -> None:
    """Print a summary of a run's workers: a table, or a document."""
    if settings.json:
        asdict = msgspec.structs.asdict
        workers = [{**asdict(one), "done": one.done, "failed": one.failed} for one in summary.workers]
        totals = {name: getattr(summary, name) for name in ("done", "failed", "lost")}
        out.emit(out.rounded({**asdict(summary), **totals, "workers": workers}))
        return
    columns = (
        Column("worker", lambda one: str(one.number), right=True, footer="all"),
        Column("host", lambda one: cell(one.host or "lost", "" if one.host else "red"), shrinks=True),
        Column("done", lambda one: count_text(one.done), right=True, footer=count_text(summary.done)),
        Column("failed", lambda one: _fault(one.failed), right=True, footer=count_text(summary.failed)),
        Column("lost", lambda one: _fault(one.lost), right=True, footer=count_text(summary.lost)),
        Column("seconds", lambda one: f"{one.seconds:.1f}", right=True, footer=f"{summary.seconds:.1f}"),
    )
    out.print_table(columns, summary.workers)
    out.console().print(cell(f"{count_text(summary.ended)} jobs ended meanwhile, by the store's count"))
    if summary.cancelled:
        text = "some tasks were cancelled: their jobs run again when their leases expire"
        out.console().print(cell(text, "yellow"))


def _fault(count: int) -> Text:
    return cell(count_text(count), "red" if count else "bright_black")
