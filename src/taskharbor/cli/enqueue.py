"""`taskharbor enqueue`: one job from the command line, or many from JSON lines."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from typing import Any

import click
import msgspec

from taskharbor.cli.bulk import enqueue_lines, enqueue_once
from taskharbor.cli.output import emit
from taskharbor.cli.problems import BadInput
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.cli.store import open_client
from taskharbor.cli.values import DURATION, INSTANT, parse_pairs
from taskharbor.client import CHUNK
from taskharbor.jobs import JobRequest, UpdateFlags

_LONGEST_NAME = 200


@click.command(
    epilog="\b\nExamples:\n"
    '  taskharbor enqueue greet \'{"name": "Ada"}\'\n'
    "  taskharbor enqueue greet --arg name=Ada --delay 10m --priority 5\n"
    "  taskharbor enqueue --from jobs.jsonl\n"
    "  taskharbor enqueue --from jobs.jsonl --once load-2026-11-17\n"
    "  produce | taskharbor enqueue --from -\n"
    "A line of JSONL:\n"
    '  {"type": "greet", "payload": {"name": "Ada"}, "queue": "mail", "delay": 60}'
)
@click.argument("type", required=False, metavar="[TYPE]")
@click.argument("payload", required=False, metavar="[PAYLOAD-JSON]")
@click.option(
    "--arg",
    "-a",
    "arguments",
    multiple=True,
    metavar="K=V",
    help="One field of the payload; JSON, else text.",
)
@click.option("--queue", "-q", metavar="QUEUE", help="Queue.  [default: default]")
@click.option("--priority", "-p", type=int, help="Higher runs first.  [default: 0]")
@click.option("--delay", type=DURATION, metavar="DURATION", help="Run after this: 90, 10m, 2h.")
@click.option(
    "--run-at", type=INSTANT, metavar="TIME", help="Run at this time (ISO 8601; local without a zone)."
)
@click.option("--key", metavar="KEY", help="One waiting job per key: a second one changes the first.")
@click.option("--update-payload/--no-update-payload", default=None, help="With --key: replace what to do.")
@click.option(
    "--update-run-at",
    type=click.Choice(["yes", "no", "later", "earlier"]),
    help="With --key: move it in time.",
)
@click.option("--update-retry/--no-update-retry", default=None, help="With --key: replace how often to try.")
@click.option(
    "--update-reset-counts/--no-update-reset-counts", default=None, help="With --key: forget what was tried."
)
@click.option("--idempotency-key", metavar="KEY", help="The same key twice is one job.")
@click.option("--max-attempts", type=click.IntRange(min=1), help="Executions before it is dead.")
@click.option("--timeout", type=DURATION, metavar="DURATION", help="Longest execution.")
@click.option("--header", "-H", "headers", multiple=True, metavar="K=V", help="A header; repeat for more.")
@click.option(
    "--from",
    "source",
    type=click.File("rb"),
    metavar="FILE|-",
    help="Many jobs: JSON lines from a file or stdin.",
)
@click.option(
    "--chunk",
    default=CHUNK,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="With --from: jobs per transaction.",
)
@click.option(
    "--once", metavar="NAME", help="With --from: all jobs or none, and at most once under this name."
)
@click.option("--ids/--no-ids", default=None, help="With --from: print every id.  [default: when piped]")
@shared_options
@click.pass_obj
def enqueue(
    settings: Settings,
    /,
    type: str | None,
    payload: str | None,
    source: Any,
    chunk: int,
    once: str | None,
    ids: bool | None,
    **options: Any,
) -> None:
    """Enqueue a job by its type's name, or many from JSON lines."""
    if source is not None:
        given = [name for name, value in options.items() if value not in (None, ())]
        if type is not None or given:
            raise BadInput(
                "with --from, everything about a job stands in its line; "
                f"leave out {'TYPE' if type is not None else '--' + given[0].replace('_', '-')}"
            )
        if once is not None:
            if ids:
                raise BadInput("leave out --ids: with --once the ids are not known here")
            if not 0 < len(once.strip()) <= _LONGEST_NAME:
                raise BadInput(f"--once takes a name of 1 to {_LONGEST_NAME} characters")
            enqueue_once(settings, source, once)
            return
        show_ids = ids if ids is not None else not settings.json and not sys.stdout.isatty()
        enqueue_lines(settings, source, chunk=chunk, ids=show_ids)
        return
    if once is not None:
        raise BadInput("--once is for --from; for one job give --idempotency-key")
    if type is None:
        raise BadInput(
            "say which type of job, or give --from FILE", hint="`taskharbor enqueue --help` has examples"
        )
    request = JobRequest(
        type=type,
        payload=_payload(payload, options["arguments"]),
        queue=options["queue"],
        run_at=_when(options["run_at"], options["delay"]),
        delay=options["delay"],
        timeout=options["timeout"],
        priority=options["priority"],
        key=options["key"],
        update=_flags(options),
        idempotency_key=options["idempotency_key"],
        max_attempts=options["max_attempts"],
        headers=parse_pairs(options["headers"], "--header") or None,
    )
    with open_client(settings, creating=True) as client:
        accepted = client.enqueue(request)
    if settings.json:
        emit({"id": accepted.id, "existed": accepted.existed})
        return
    click.echo(accepted.id)
    if accepted.existed:
        click.echo("it was there already (same key or idempotency key)", err=True)


def _payload(text: str | None, arguments: tuple[str, ...]) -> Any:
    if text is not None and arguments:
        raise BadInput("give the payload as JSON or by --arg, not both")
    if arguments:
        return {name: _guess(value) for name, value in parse_pairs(arguments, "--arg").items()}
    if text is None:
        return {}
    if text == "-":
        text = sys.stdin.read()
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise BadInput(
            f"the payload is not JSON: {error}",
            hint='quote it for the shell: \'{"name": "Ada"}\', or use --arg name=Ada',
        ) from None


def _guess(value: str) -> Any:
    """`n=3` is a number, `ok=true` a boolean, `name=Ada` text; `zip='"0123"'` where it must be text."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return value


def _when(run_at: datetime | None, delay: timedelta | None) -> datetime | None:
    if run_at is not None and delay is not None:
        raise BadInput("give either --run-at or --delay, not both")
    return run_at


def _flags(options: dict[str, Any]) -> UpdateFlags | None:
    names = {
        "payload": "update_payload",
        "run_at": "update_run_at",
        "retry": "update_retry",
        "reset_counts": "update_reset_counts",
    }
    given = {flag: options[option] for flag, option in names.items() if options[option] is not None}
    if not given:
        return None
    if options["key"] is None:
        raise BadInput("the --update options say how to change a job with the same key: give --key too")
    return UpdateFlags(**given)
