"""`taskharbor list`: jobs, newest accepted first."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from taskharbor.cli.documents import job_document
from taskharbor.cli.output import Column, cell, console, emit, is_narrow, state_cell, table
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.cli.store import open_client
from taskharbor.cli.values import relative_text
from taskharbor.client import Client
from taskharbor.drivers.contract import JobFilter
from taskharbor.jobs import JobRecord, JobState, Micros

LARGEST_PAGE = 1000


@click.command("list")
@click.option("--queue", "-q", metavar="QUEUE", help="Only this queue.")
@click.option(
    "--state",
    "-s",
    multiple=True,
    type=click.Choice([str(state) for state in JobState]),
    help="Only this state; repeat for more.",
)
@click.option("--type", "-t", "types", multiple=True, metavar="TYPE", help="Only this type; repeat for more.")
@click.option("--key", metavar="KEY", help="Only jobs with this key.")
@click.option("--worker", metavar="NAME", help="Only jobs that this worker holds.")
@click.option(
    "--limit", "-n", default=50, show_default=True, type=click.IntRange(min=1), help="At most so many."
)
@click.option("--all", "everything", is_flag=True, help="All of them, page after page.")
@click.option("--cursor", metavar="CURSOR", help="Go on where a listing stopped.")
@click.option("--payload", is_flag=True, help="With --json: payloads and results too.")
@shared_options
@click.pass_obj
def list_jobs(
    settings: Settings,
    queue: str | None,
    state: tuple[str, ...],
    types: tuple[str, ...],
    key: str | None,
    worker: str | None,
    limit: int,
    everything: bool,
    cursor: str | None,
    payload: bool,
) -> None:
    """List jobs, newest accepted first."""
    selection = JobFilter(
        queue=queue,
        states=frozenset(JobState(one) for one in state) or None,
        types=frozenset(types) or None,
        key=key,
        worker=worker,
    )
    with open_client(settings) as client:
        listing = Listing(client, selection, None if everything else limit, cursor)
        if settings.json:
            for job in listing:
                emit(job_document(job, payload=payload))
        else:
            show(list(listing), client.now(), queue_shown=queue is None)
        listing.tell_more(settings)


class Listing:
    """Jobs page by page; `cursor` says where it stopped, None at the end."""

    def __init__(self, client: Client, selection: JobFilter, limit: int | None, cursor: str | None) -> None:
        self._client = client
        self._selection = selection
        self._left = limit
        self.cursor = cursor

    def __iter__(self) -> Iterator[JobRecord]:
        while self._left != 0:
            size = LARGEST_PAGE if self._left is None else min(self._left, LARGEST_PAGE)
            page = self._client.list_jobs(self._selection, limit=size, cursor=self.cursor)
            self.cursor = page.cursor
            if self._left is not None:
                self._left -= len(page.jobs)
            yield from page.jobs
            if page.cursor is None:
                return

    def tell_more(self, settings: Settings) -> None:
        """On stderr, so that stdout has jobs and nothing else."""
        if self.cursor is not None:
            more = msgspec.json.encode({"cursor": self.cursor}).decode()
            click.echo(more if settings.json else f"more: --cursor {self.cursor}", err=True)


def show(jobs: list[JobRecord], now: Micros, *, queue_shown: bool = True) -> None:
    """The id always whole (it is what one copies); what does not fit a narrow terminal is left out or cut."""
    if not jobs:
        click.echo("no jobs match", err=True)
        return
    screen = console()
    narrow, wide = is_narrow(screen), screen.width >= 120
    columns = [Column("id"), Column("type", shrinks=1)]
    if queue_shown and not narrow:
        columns.append(Column("queue", shrinks=2))
    columns.append(Column("state"))
    if not narrow:
        columns += [Column("failed", right=True), Column("when")]
    if wide:
        columns.append(Column("key / reason", shrinks=3))
    rows = []
    for job in jobs:
        row = [cell(job.id), cell(job.type)]
        if queue_shown and not narrow:
            row.append(cell(job.queue))
        row.append(state_cell(job.state))
        if not narrow:
            row += [cell(f"{job.attempts + job.stalls}/{job.max_attempts}"), cell(moment(job, now))]
        if wide:
            row.append(cell(remark(job), "bright_black"))
        rows.append(row)
    screen.print(table(screen, columns, rows))


def moment(job: JobRecord, now: Micros) -> str:
    """The instant that matters in its state: due, leased or ended."""
    if job.state is JobState.INFLIGHT:
        return relative_text(job.reserved_at_us or now, now)
    return relative_text(job.run_at_us if job.finished_at_us is None else job.finished_at_us, now)


def remark(job: JobRecord) -> str:
    if job.merged_into:
        return f"merged into {job.merged_into}"
    if job.last_error and job.state is not JobState.DONE:
        return job.last_error.partition("\n")[0]
    return job.key or ""
