"""`taskharbor queues`: what an operator can say of a queue, and what was said."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click
import msgspec

from taskharbor.cli.documents import settings_document, stats_document
from taskharbor.cli.groups import Group
from taskharbor.cli.output import Column, cell, console, emit, is_narrow, table
from taskharbor.cli.problems import BadInput
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.cli.store import open_client
from taskharbor.cli.values import DURATION_OR_FOREVER, DurationOrForever, ParamType, count_text, kept_text
from taskharbor.client import Client
from taskharbor.drivers.contract import QueueSettings, QueueStats
from taskharbor.jobs import WAITING_STATES, JobState, Micros, to_micros


class CountOrNone(ParamType):
    """A number from 1, or `none`; 0 stands for none, which the contract writes as None."""

    name = "number|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if value.lower() == "none":
            return 0
        if not value.isdecimal() or int(value) < 1:
            self.fail(f"{value!r}: a whole number from 1, or none; to stop a queue, pause it", param, ctx)
        return int(value)


@click.group(cls=Group, invoke_without_command=True)
@shared_options
@click.pass_context
def queues(context: click.Context) -> None:
    """Queues: list, pause, resume, limit, retention."""
    if context.invoked_subcommand is None:
        context.invoke(list_queues)


@queues.command("list")
@shared_options
@click.pass_obj
def list_queues(settings: Settings) -> None:
    """List queues with their settings."""
    with open_client(settings) as client:
        stats = client.stats()
        now = client.now()
    if settings.json:
        for one in stats:
            emit(stats_document(one, now))
        return
    if not stats:
        click.echo("no queues yet: the first enqueue makes one", err=True)
        return
    _show(stats)


@queues.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE...")
@shared_options
@click.pass_obj
def pause(settings: Settings, names: tuple[str, ...]) -> None:
    """Start nothing more from a queue. What runs, finishes; enqueueing goes on."""
    _change_all(settings, names, paused=True)


@queues.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE...")
@shared_options
@click.pass_obj
def resume(settings: Settings, names: tuple[str, ...]) -> None:
    """Undo a pause."""
    _change_all(settings, names, paused=False)


@queues.command()
@click.argument("queue", metavar="QUEUE")
@click.option(
    "--max-inflight", type=CountOrNone(), metavar="N|none", help="Never more jobs at once, over all workers."
)
@click.option(
    "--failure-queue", metavar="QUEUE|none", help="Enqueue a job there for every one that dies here."
)
@shared_options
@click.pass_obj
def limit(settings: Settings, queue: str, max_inflight: int | None, failure_queue: str | None) -> None:
    """Limit how many run at once, and name a failure queue."""
    changes: dict[str, Any] = {}
    if max_inflight is not None:
        changes["max_inflight"] = max_inflight or None
    if failure_queue is not None:
        changes["failure_queue"] = None if failure_queue.lower() == "none" else failure_queue
    if not changes:
        raise BadInput("nothing to change: give --max-inflight or --failure-queue")
    _change_all(settings, (queue,), **changes)


@queues.command()
@click.argument("queue", metavar="QUEUE")
@click.option(
    "--done", type=DURATION_OR_FOREVER, metavar="AGE|forever", help="Keep done and cancelled jobs so long."
)
@click.option("--dead", type=DURATION_OR_FOREVER, metavar="AGE|forever", help="Keep dead jobs so long.")
@click.option(
    "--attempts", type=DURATION_OR_FOREVER, metavar="AGE|forever", help="Keep the attempt log so long."
)
@shared_options
@click.pass_obj
def retention(
    settings: Settings, queue: str, done: timedelta | None, dead: timedelta | None, attempts: timedelta | None
) -> None:
    """How long ended jobs and the attempt log stay: 7d, 12h, forever."""
    given = {"keep_done_us": done, "keep_dead_us": dead, "keep_attempts_us": attempts}
    changes = {name: _kept(value) for name, value in given.items() if value is not None}
    if not changes:
        raise BadInput("nothing to change: give --done, --dead or --attempts, like --done 7d")
    _change_all(settings, (queue,), **changes)


def _kept(value: timedelta) -> Micros | None:
    return None if value is DurationOrForever.FOREVER else to_micros(value)


def _change_all(settings: Settings, names: tuple[str, ...], **changes: Any) -> None:
    with open_client(settings, creating=True) as client:
        for name in names:
            changed = _change(client, name, changes)
            if settings.json:
                emit({"queue": name, **settings_document(changed)})
            else:
                click.echo(f"{name}: {_sentence(changed)}")


def _change(client: Client, queue: str, changes: dict[str, Any]) -> QueueSettings:
    changed = msgspec.structs.replace(client.settings(queue), **changes)
    client.configure(queue, changed)
    return changed


def _sentence(settings: QueueSettings) -> str:
    parts = [
        "paused" if settings.paused else "running",
        f"at most {settings.max_inflight} at once" if settings.max_inflight else "no limit",
    ]
    if settings.failure_queue:
        parts.append(f"failures to {settings.failure_queue}")
    kept = f"done {kept_text(settings.keep_done_us)}, dead {kept_text(settings.keep_dead_us)}"
    return f"{', '.join(parts)}; keeps {kept}, attempts {kept_text(settings.keep_attempts_us)}"


def _show(stats: list[QueueStats]) -> None:
    screen = console()
    wide = not is_narrow(screen)
    columns = [
        Column("queue", shrinks=1),
        Column(""),
        Column("waiting", right=True),
        Column("running", right=True),
        Column("limit", right=True),
        *([Column("failures to", shrinks=2)] if wide else []),
        Column("keeps done / dead / attempts" if wide else "keeps"),
    ]
    rows = []
    for one in stats:
        settings = one.settings
        kept = (settings.keep_done_us, settings.keep_dead_us, settings.keep_attempts_us)
        rows.append(
            [
                cell(one.queue),
                cell("paused", "yellow") if settings.paused else cell("on", "green"),
                cell(count_text(sum(one.counts.get(state, 0) for state in WAITING_STATES))),
                cell(count_text(one.counts.get(JobState.INFLIGHT, 0))),
                cell(str(settings.max_inflight or "-")),
                *([cell(settings.failure_queue or "-")] if wide else []),
                cell(" / ".join(kept_text(one) for one in kept)),
            ]
        )
    screen.print(table(screen, columns, rows))
