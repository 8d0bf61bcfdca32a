"""`taskharbor cancel`: waiting jobs end at once, running ones are asked to."""

from __future__ import annotations

from collections.abc import Iterable

import click

from taskharbor.cli.output import emit
from taskharbor.cli.problems import FAILED
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.cli.store import open_client
from taskharbor.errors import JobError
from taskharbor.jobs import JobState


@click.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@shared_options
@click.pass_context
def cancel(context: click.Context, ids: tuple[str, ...]) -> None:
    """Cancel jobs by id.

    A waiting job is cancelled at once. A running one is asked to stop: its worker learns of it with the next
    heartbeat.
    """
    settings = context.ensure_object(Settings)
    with open_client(settings) as client:
        answers = client.cancel_many(ids)
    words = {JobState.INFLIGHT: "is running: asked to stop", JobState.CANCELLED: "cancelled"}
    if not tell(zip(ids, answers, strict=True), settings, words):
        context.exit(FAILED)


def tell(
    answers: Iterable[tuple[str, JobState | JobError]], settings: Settings, words: dict[JobState, str]
) -> bool:
    """One line per job, errors on stderr; whether all went well."""
    well = True
    for job_id, answer in answers:
        failed = isinstance(answer, JobError)
        well = well and not failed
        if settings.json:
            if isinstance(answer, JobError):
                emit({"id": job_id, "error": str(answer), "kind": type(answer).__name__})
            else:
                emit({"id": job_id, "state": answer})
        elif isinstance(answer, JobError):
            click.secho("error: ", fg="red", bold=True, nl=False, err=True)
            click.echo(str(answer), err=True)
        else:
            click.echo(f"{job_id} {words.get(answer, answer)}")
    return well
