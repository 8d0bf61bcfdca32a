"""`taskharbor cancel` and `taskharbor dlq`: cancel jobs; list, requeue and purge dead jobs."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click

from taskharbor.broker.models import CancelledKeys, RemovedJobs, batch_item
from taskharbor.cli import options as opt
from taskharbor.cli.errors import BadInput, CommandFailed
from taskharbor.cli.jobs import LARGEST_PAGE, Listing, cursor_option, limit_option, select, tell, types_option
from taskharbor.cli.options import Invocation, flag, option
from taskharbor.cli.output import answer, duration_text, say
from taskharbor.client import chunks
from taskharbor.errors import JobError
from taskharbor.jobs import JobState, to_datetime, to_micros

DEAD = (JobState.DEAD,)


@opt.command()
@click.argument("ids", nargs=-1, metavar="[ID...]")
@option("--key -k keys", "KEY", "The jobs of this key, in --queue; repeat for more.", multiple=True)
@opt.queue_option
@flag("--only-waiting", "Leave running jobs alone.")
def cancel(
    settings: Invocation, ids: tuple[str, ...], keys: tuple[str, ...], queue: str | None, only_waiting: bool
) -> int:
    """Cancel jobs: by id, or by --key and --queue.

    A waiting job is cancelled at once. A running one is asked to stop: its worker learns of it with the next
    heartbeat.
    """
    if bool(ids) == bool(keys) or bool(keys) != bool(queue):
        hint = "`taskharbor list` shows ids and keys"
        raise BadInput("say which: either ids, or --key with --queue", hint=hint)
    with opt.open_client(settings) as client:
        if queue:
            keys = tuple(dict.fromkeys(keys))
            counts = dict(zip(keys, client.cancel_keys(queue, keys, only_waiting=only_waiting), strict=True))
            how = "cancelled" if only_waiting else "cancelled or asked to stop"
            answer(settings, CancelledKeys(counts), f"{sum(counts.values())} {how}")
            if missed := ", ".join(repr(key) for key, count in counts.items() if not count):
                what = "waits" if only_waiting else "waits or runs"
                said = f"no job with the key {missed} {what} in queue {queue!r}"
                raise CommandFailed(said, kind="job_not_found")
            return 0
        answers = client.cancel_many(ids, only_waiting=only_waiting)
    running = "is running: left alone" if only_waiting else "is running: asked to stop"
    words = {JobState.INFLIGHT: running, JobState.CANCELLED: "cancelled"}
    return tell(zip(ids, answers, strict=True), settings, words)


@click.group(cls=opt.Group, invoke_without_command=True)
def dlq(settings: Invocation) -> None:
    """Dead letters: list, requeue, purge."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        context.invoke(list_dead)


@dlq.command("list")
@opt.queue_option
@types_option
@limit_option
@cursor_option
def list_dead(settings: Invocation, /, limit: int, cursor: str | None, **selected: Any) -> None:
    """List dead jobs with what killed them."""
    with opt.open_client(settings) as client:
        listing = Listing(client, select(states=DEAD, **selected), limit, cursor)
        listing.show(settings, "no dead jobs")


@dlq.command()
@click.argument("ids", nargs=-1, metavar="[ID...]")
@flag("--all everything", "Every dead job.")
@opt.queue_option
@types_option
@option("--run-at", opt.instant, "Run them at this time (ISO 8601; local without a zone).", metavar="TIME")
@option("--delay", opt.duration, "Run them after this: 90, 10m, 2h.")
@flag("--keep-counts", "Keep the attempts that they have spent.")
@flag("--dry-run", "Only say which.")
def requeue(
    settings: Invocation,
    /,
    ids: tuple[str, ...],
    everything: bool,
    run_at: datetime | None,
    delay: timedelta | None,
    keep_counts: bool,
    dry_run: bool,
    **selected: Any,
) -> int:
    """Send dead jobs round again, with all their attempts: by id, or by --all, --queue, --type."""
    if run_at is not None and delay is not None:
        raise BadInput("give either --delay or --run-at, not both")
    if bool(ids) == (everything or any(selected.values())):
        wanted = "say which: either ids, or a selection by --all, --queue or --type"
        raise BadInput(wanted, hint="`taskharbor dlq list` shows what is there")
    with opt.open_client(settings) as client:
        if delay is not None:
            run_at = to_datetime(client.now()) + delay
        if dry_run:
            found = client.get_many(ids) if ids else Listing(client, select(states=DEAD, **selected))
            dead = [job.id for job in found if job is not None and job.state is JobState.DEAD]
            answer(settings, {"dead": dead}, *dead, f"{len(dead)} would be requeued")
            return 0
        send = partial(client.requeue_many, run_at=run_at, keep_counts=keep_counts)
        if ids:
            blocked = "waits for the running job of its key"
            words = {JobState.READY: "is ready again", JobState.BLOCKED: blocked}
            return tell(zip(ids, send(ids), strict=True), settings, words)
        listing = Listing(client, select(states=DEAD, **selected))
        results: list[JobState | JobError] = []
        for page in chunks(listing, LARGEST_PAGE):
            results += send([job.id for job in page])
    kept = [one for one in results if isinstance(one, JobError)]
    requeued = len(results) - len(kept)
    for one in () if settings.json else kept[:10]:
        say(f"kept: {one}", err=True)
    document = {"requeued": requeued, "kept": [batch_item(one.job_id, one) for one in kept]}
    answer(settings, document, f"{requeued} requeued" + (f", {len(kept)} kept" if kept else ""))
    return 0


@dlq.command()
@flag("--all everything", "Every dead job.")
@opt.queue_option
@types_option
@option("--older-than", opt.duration, "Only what died longer ago than this: 7d, 12h.", metavar="AGE")
@flag("--yes -y", "Do not ask.")
def purge(settings: Invocation, /, older_than: timedelta | None, yes: bool, **selected: Any) -> None:
    """Remove dead jobs for good: by --all, --queue, --type, --older-than."""
    if not (selected.pop("everything") or older_than or any(selected.values())):
        wanted = "say which: a selection by --all, --queue, --type or --older-than"
        raise BadInput(wanted, hint="`taskharbor dlq list` shows what is there")
    if settings.json and not yes:
        raise BadInput("purge asks before it removes, and --json cannot be asked", hint="add --yes")
    with opt.open_client(settings) as client:
        before = None if older_than is None else client.now() - to_micros(older_than)
        selection = select(states=DEAD, finished_before_us=before, **selected)
        if not yes:
            page = client.list_jobs(selection, limit=LARGEST_PAGE)
            if not page.jobs:
                click.echo("no dead jobs match: nothing was removed")
                return
            many = f"{len(page.jobs)} or more" if page.cursor is not None else str(len(page.jobs))
            where = f" of queue {selection.queue}" if selection.queue else ""
            age = f" that died more than {duration_text(to_micros(older_than))} ago" if older_than else ""
            jobs = f"{many} dead job{'' if many == '1' else 's'}{where}{age}"
            click.confirm(f"Remove {jobs} for good?", abort=True, err=True)
        removed = 0
        while gone := client.purge(selection, limit=LARGEST_PAGE):
            removed += gone
    answer(settings, RemovedJobs(removed), f"{removed} removed")
