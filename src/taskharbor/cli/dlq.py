"""`taskharbor dlq`: the dead letters. Look at them, send them round again, or let them go."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import click

from taskharbor.cli.cancel import tell
from taskharbor.cli.documents import job_document
from taskharbor.cli.groups import Group
from taskharbor.cli.list import LARGEST_PAGE, Listing
from taskharbor.cli.output import Column, cell, console, emit, is_narrow, table
from taskharbor.cli.problems import FAILED, BadInput
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.cli.store import open_client
from taskharbor.cli.values import DURATION, duration_text, relative_text
from taskharbor.client import Client
from taskharbor.drivers.contract import JobFilter
from taskharbor.errors import JobError
from taskharbor.jobs import JobRecord, JobState, Micros, to_micros

DEAD = frozenset({JobState.DEAD})

_queue = click.option("--queue", "-q", metavar="QUEUE", help="Only this queue.")
_types = click.option(
    "--type", "-t", "types", multiple=True, metavar="TYPE", help="Only this type; repeat for more."
)


@click.group(cls=Group, invoke_without_command=True)
@shared_options
@click.pass_context
def dlq(context: click.Context) -> None:
    """Dead letters: list, requeue, purge."""
    if context.invoked_subcommand is None:
        context.invoke(list_dead)


@dlq.command("list")
@_queue
@_types
@click.option(
    "--limit", "-n", default=50, show_default=True, type=click.IntRange(min=1), help="At most so many."
)
@click.option("--cursor", metavar="CURSOR", help="Go on where a listing stopped.")
@shared_options
@click.pass_obj
def list_dead(
    settings: Settings, queue: str | None, types: tuple[str, ...], limit: int, cursor: str | None
) -> None:
    """List dead jobs with what killed them."""
    with open_client(settings) as client:
        listing = Listing(client, _selection(queue, types), limit, cursor)
        jobs = list(listing)
        if settings.json:
            for job in jobs:
                emit(job_document(job, payload=False))
        else:
            _show(jobs, client.now())
        listing.tell_more(settings)


@dlq.command()
@click.argument("ids", nargs=-1, metavar="[ID...]")
@click.option("--all", "everything", is_flag=True, help="Every dead job.")
@_queue
@_types
@shared_options
@click.pass_context
def requeue(
    context: click.Context, ids: tuple[str, ...], everything: bool, queue: str | None, types: tuple[str, ...]
) -> None:
    """Send dead jobs round again, with all their attempts: by id, or by --all, --queue, --type."""
    settings = context.ensure_object(Settings)
    by_filter = bool(everything or queue or types)
    if bool(ids) == by_filter:
        raise BadInput(
            "say which: either ids, or a selection by --all, --queue or --type",
            hint="`taskharbor dlq list` shows what is there",
        )
    with open_client(settings) as client:
        if ids:
            words = {
                JobState.READY: "is ready again",
                JobState.BLOCKED: "waits for the running job of its key",
            }
            if not tell(zip(ids, client.requeue_many(ids), strict=True), settings, words):
                context.exit(FAILED)
            return
        requeued, kept = 0, []
        for page in _pages(client, _selection(queue, types)):
            answers = client.requeue_many([job.id for job in page])
            kept += [answer for answer in answers if isinstance(answer, JobError)]
            requeued += sum(not isinstance(answer, JobError) for answer in answers)
    if settings.json:
        emit({"requeued": requeued, "kept": [{"id": one.job_id, "error": str(one)} for one in kept]})
    else:
        for one in kept[:10]:
            click.echo(f"kept: {one}", err=True)
        click.echo(f"{requeued} requeued" + (f", {len(kept)} kept" if kept else ""))


@dlq.command()
@_queue
@_types
@click.option(
    "--older-than", type=DURATION, metavar="AGE", help="Only what died longer ago than this: 7d, 12h."
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@shared_options
@click.pass_obj
def purge(
    settings: Settings, queue: str | None, types: tuple[str, ...], older_than: timedelta | None, yes: bool
) -> None:
    """Remove dead jobs for good."""
    with open_client(settings) as client:
        before = None if older_than is None else client.now() - to_micros(older_than)
        selection = _selection(queue, types, before)
        if not yes:
            _confirm(client, selection, settings, older_than)
        removed = 0
        while gone := client.purge(selection, limit=LARGEST_PAGE):
            removed += gone
    if settings.json:
        emit({"purged": removed})
    else:
        click.echo(f"{removed} removed")


def _confirm(client: Client, selection: JobFilter, settings: Settings, older_than: timedelta | None) -> None:
    if settings.json:
        raise BadInput("purge asks before it removes, and --json cannot be asked", hint="add --yes")
    page = client.list_jobs(selection, limit=LARGEST_PAGE)
    many = f"{len(page.jobs)} or more" if page.cursor is not None else str(len(page.jobs))
    where = f" of queue {selection.queue}" if selection.queue else ""
    age = f" that died more than {duration_text(to_micros(older_than))} ago" if older_than is not None else ""
    click.confirm(f"Remove {many} dead jobs{where}{age} for good?", abort=True, err=True)


def _selection(queue: str | None, types: tuple[str, ...], before: Micros | None = None) -> JobFilter:
    return JobFilter(queue=queue, states=DEAD, types=frozenset(types) or None, finished_before_us=before)


def _pages(client: Client, selection: JobFilter) -> Iterator[list[JobRecord]]:
    cursor: str | None = None
    while True:
        page = client.list_jobs(selection, limit=LARGEST_PAGE, cursor=cursor)
        if page.jobs:
            yield page.jobs
        cursor = page.cursor
        if cursor is None:
            return


def _show(jobs: list[JobRecord], now: Micros) -> None:
    if not jobs:
        click.echo("no dead jobs", err=True)
        return
    screen = console()
    narrow = is_narrow(screen)
    if narrow:
        columns = [Column("id"), Column("what died", shrinks=1)]
    else:
        columns = [Column("id"), Column("type", shrinks=1), Column("died"), Column("because", shrinks=2)]
    rows = []
    for job in jobs:
        reason = (job.last_error or "no reason recorded").partition("\n")[0]
        if narrow:
            rows.append([cell(job.id), cell(f"{job.type}: {reason}", "red")])
        else:
            died = relative_text(job.finished_at_us or now, now)
            rows.append([cell(job.id), cell(job.type), cell(died), cell(reason, "red")])
    screen.print(table(screen, columns, rows))
