"""`taskharbor enqueue`: one job from the command line, or many from JSON lines.

Lines are sent in chunks, so memory stays flat. After a bad line the user can go on from that line.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import click
import msgspec

from taskharbor.broker.models import NewJob, job_request
from taskharbor.bulk import publish_staged, stage
from taskharbor.cli import options as opt
from taskharbor.cli.errors import INTERRUPTED, UNAVAILABLE, BadInput, CommandFailed
from taskharbor.cli.options import Invocation, flag, option
from taskharbor.cli.output import Show, answer, emit, plural, progress
from taskharbor.client import CHUNK, Client, chunks, portal
from taskharbor.drivers.operations import Enqueue
from taskharbor.drivers.urls import shown_url
from taskharbor.errors import BackendUnavailable, CodecError, InvalidRequest, field_error
from taskharbor.handlers import Handler
from taskharbor.harbor import Harbor
from taskharbor.jobs import JobRecord, JobRequest, Micros, UpdateFlags
from taskharbor.requests import EncodedPayload, RecordBuilder, new_id

_LONGEST_NAME = 200


@opt.command(
    epilog="\b\nExamples:\n"
    '  taskharbor enqueue greet \'{"name": "Ada"}\'\n'
    '  taskharbor enqueue --app jobs:harbor greet \'{"name": "Ada"}\'\n'
    "  taskharbor enqueue greet --arg name=Ada --delay 10m --priority 5\n"
    "  taskharbor enqueue --from jobs.jsonl\n"
    "  taskharbor enqueue --from jobs.jsonl --once load-2026-11-17\n"
    "  produce | taskharbor enqueue --from -\n"
    "A line of JSONL:\n"
    '  {"type": "greet", "payload": {"name": "Ada"}, "delay_seconds": 60}'
)
@click.argument("type", required=False, metavar="[TYPE]")
@click.argument("words", metavar="[PAYLOAD-JSON]", nargs=-1)
@option("--arg -a arguments", "K=V", "One field of the payload; JSON, else text.", multiple=True)
@option("--queue -q", "QUEUE", "Queue.  [default: the one that the app declares, else default]")
@option("--priority -p", int, "Higher runs first.  [default: as declared, else 0]")
@option("--delay", opt.duration, "Run after this: 90, 10m, 2h.")
@option("--run-at", opt.instant, "Run at this time (ISO 8601; local without a zone).", metavar="TIME")
@option("--key", "KEY", "One waiting job per key: a second one changes the first.")
@flag("--update-payload/--no-update-payload", "With --key: replace what to do.", default=None)
@option("--update-run-at", click.Choice(["yes", "no", "later", "earlier"]), "With --key: move it in time.")
@flag("--update-retry/--no-update-retry", "With --key: replace how often to try.", default=None)
@flag("--update-reset-counts/--no-update-reset-counts", "With --key: forget what was tried.", default=None)
@flag("--update-priority/--no-update-priority", "With --key: replace its priority.", default=None)
@option("--idempotency-key", "KEY", "The same key twice is one job.")
@option("--max-attempts", opt.COUNT, "Executions before it is dead.")
@option("--timeout", opt.duration, "Longest execution.")
@option("--header -H headers", "K=V", "A header; repeat for more.", multiple=True)
@option("--from source", click.File("rb"), "Many jobs: JSON lines from a file or stdin.", metavar="FILE|-")
@option("--chunk", click.IntRange(1, 10_000), "With --from: jobs per transaction.", CHUNK)
@option("--once", "NAME", "With --from: all jobs or none, and at most once under this name.")
@flag("--ids/--no-ids", "With --from: print every id.  [default: when piped]", default=None)
def enqueue(
    settings: Invocation,
    /,
    type: str | None,
    words: tuple[str, ...],
    source: Any,
    chunk: int,
    once: str | None,
    ids: bool | None,
    **options: Any,
) -> None:
    """Enqueue a job by its type's name, or many from JSON lines. With --app, declared options apply and payloads are checked."""
    app = settings.harbor if settings.app else None
    if source is not None:
        given = [name for name, value in options.items() if value not in (None, ())]
        if type is not None or given:
            extra = "TYPE" if type is not None else f"--{given[0].replace('_', '-')}"
            raise BadInput(f"with --from, everything about a job stands in its line; leave out {extra}")
        if once is not None and ids:
            raise BadInput("leave out --ids: with --once the ids are not known here")
        if once is not None and not 0 < len(once.strip()) <= _LONGEST_NAME:
            raise BadInput(f"--once takes a name of 1 to {_LONGEST_NAME} characters")
        show_ids = ids if ids is not None else not settings.json and not sys.stdout.isatty()
        with (
            opt.open_client(settings, creating=True) as client,
            progress(settings, on_terminal_only=True) as show,
        ):
            lines = Lines(source, app)
            if once is not None:
                enqueue_once(settings, client, lines, once, show)
            else:
                enqueue_lines(settings, client, lines, chunk, show_ids, show)
        return
    if once is not None:
        raise BadInput("--once is for --from; for one job give --idempotency-key")
    if type is None:
        hint = "`taskharbor enqueue --help` has examples"
        raise BadInput("say which type of job, or give --from FILE", hint=hint)
    decoded = payload_of(words, options["arguments"], app.handlers.get(type) if app else None)
    if options["run_at"] is not None and options["delay"] is not None:
        raise BadInput("give either --run-at or --delay, not both")
    fields = {name: value for name, value in options.items() if name in JobRequest.__struct_fields__}
    fields |= {"update": _flags(options), "headers": opt.parse_pairs(options["headers"], "--header") or None}
    request = JobRequest(type=type, payload=decoded, **fields)
    with opt.open_client(settings, creating=True) as client:
        (accepted,) = client.enqueue_batch([_declared(app, request)])
    answer(settings, accepted, accepted.id)
    if accepted.existed and not settings.json:
        click.echo("it was there already (same key or idempotency key)", err=True)


def _declared(app: Harbor | None, request: JobRequest) -> JobRequest:
    """With an app: the request with the options that the app declares, its payload checked."""
    if app is None:
        return request
    app.require(request.type)
    if isinstance(request.payload, EncodedPayload):
        request.payload = app.codecs.get(request.codec or app.defaults.codec).decode(request.payload.data)
    return app._checked([request])[0]


_QUOTE = 'quote it for the shell: \'{"name": "Ada"}\', or use --arg name=Ada'


def payload_of(words: tuple[str, ...], arguments: tuple[str, ...], handler: Handler | None) -> Any:
    """Return the payload that a command line gives, as JSON in one word or by arguments."""
    if len(words) > 1:
        said = f"the payload is one word for the shell, and here are {len(words)}: {' '.join(words)}"
        raise BadInput(said, hint=_QUOTE)
    if words and arguments:
        raise BadInput("give the payload as JSON or by --arg, not both")
    if not words:
        declared = handler.arguments.type if handler and handler.arguments else msgspec.Struct
        texts = {one.name for one in msgspec.structs.fields(declared) if one.type in (str, str | None)}
        given = opt.parse_pairs(arguments, "--arg")
        return {name: value if name in texts else _guess(value) for name, value in given.items()}
    try:
        return msgspec.json.decode(sys.stdin.read() if words[0] == "-" else words[0])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise BadInput(f"the payload is not JSON: {error}", hint=_QUOTE) from None


def _guess(value: str) -> Any:
    """`n=3` is a number, `ok=true` a boolean, `name=Ada` text; `zip='"0123"'` where it must be text."""
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return value


def _flags(options: dict[str, Any]) -> UpdateFlags | None:
    flags = {flag: options[f"update_{flag}"] for flag in UpdateFlags.__struct_fields__}
    given = {flag: value for flag, value in flags.items() if value is not None}
    if not given:
        return None
    if options["key"] is None:
        raise BadInput("the --update options say how to change a job with the same key: give --key too")
    return UpdateFlags(**given)


# -- many jobs ---------------------------------------------------------------------------------------------

LONGEST_LINE = 4 * 1024 * 1024
_decode = msgspec.json.Decoder(NewJob).decode


def _request(line: bytes) -> JobRequest:
    """A line of the file: a new job as the HTTP API takes it, or a job as `taskharbor list --json --payload` shows it."""
    if line.startswith(b'{"cursor":'):
        raise msgspec.ValidationError("the listing stopped here: list with --all for all jobs")
    job = _decode(line)
    if job.payload_base64 is not None:
        if job.payload is not msgspec.UNSET:
            raise msgspec.ValidationError("give either payload or payload_base64, not both")
        return job_request(job, EncodedPayload(job.payload_base64))
    payload = {} if isinstance(job.payload, msgspec.UnsetType) else msgspec.json.decode(job.payload)
    return job_request(job, payload)


def _reason(line: bytes, error: Exception) -> str:
    """Return the reason, with the refused value beside the expected one."""
    try:
        fields = json.loads(line, object_hook=lambda named: SimpleNamespace(**named))
    except (ValueError, RecursionError):
        return str(error)
    return str(field_error(fields, str(error))) if " - at `$." in str(error) else str(error)


class BadLine(NamedTuple):
    """A line that cannot be a job."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.number}: {self.reason}"


class Lines:
    """The jobs of a file of JSON lines, in chunks.

    A line that cannot be a job ends the iteration instead of breaking it, so that what stood before it is still sent.
    """

    def __init__(self, file: BinaryIO, app: Harbor | None = None) -> None:
        self._file = file
        self._app = app
        self.name = str(getattr(file, "name", "FILE")).replace("<stdin>", "FILE")
        self._builder = RecordBuilder() if app is None else RecordBuilder(app.defaults, app.codecs)
        self.size: int | None = None
        with suppress(OSError, AttributeError):
            self.size = os.fstat(file.fileno()).st_size or None
        self.bytes_read = 0
        self.next_line = 1
        """The line after those of the chunks that were sent."""
        self.bad: BadLine | None = None

    def chunks(self, size: int, clock: Callable[[], Micros]) -> Iterator[list[JobRecord]]:
        """Yield up to `size` records at once, made at the clock's time. A chunk is read when the one before it was sent."""
        for chunk in chunks(self._requests(), size):
            now, records = clock(), []
            try:
                records = self._builder.build([request for _, request in chunk], now)
            except (InvalidRequest, CodecError):
                # Refused as a whole, because of one line.
                for number, request in chunk:
                    try:
                        records += self._builder.build([request], now)
                    except (InvalidRequest, CodecError) as error:
                        self.bad = BadLine(number, str(error))
                        break
            if records:
                yield records
            if self.bad is not None:
                return
            self.next_line = chunk[-1][0] + 1

    def _requests(self) -> Iterator[tuple[int, JobRequest]]:
        number = 0
        while raw := self._file.readline(LONGEST_LINE + 1):
            number += 1
            self.bytes_read += len(raw)
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if len(raw) > LONGEST_LINE:
                self.bad = BadLine(number, f"longer than {LONGEST_LINE} bytes")
                return
            if not raw.strip():
                continue
            try:
                request = _declared(self._app, _request(raw))
            except (msgspec.DecodeError, UnicodeDecodeError, InvalidRequest, CodecError) as error:
                is_of_the_line = isinstance(error, msgspec.DecodeError)
                self.bad = BadLine(number, _reason(raw, error) if is_of_the_line else str(error))
                return
            yield number, request


def enqueue_lines(
    settings: Invocation, client: Client, lines: Lines, chunk: int, ids: bool, show: Show
) -> None:
    """Enqueue chunk by chunk. Each is accepted before the next is read."""
    started = time.monotonic()
    accepted = existed = 0
    try:
        for records in lines.chunks(chunk, client.now):
            # `chunks` has checked the records.
            call = Enqueue(records, records[0].created_at_us, new_ids=True)
            batch = portal().call(client.driver.run(call))
            accepted += len(batch)
            existed += sum(one.existed for one in batch)
            for one in batch if ids else ():
                answer(settings, one, one.id)
            show(f"{accepted:,} jobs", lines.bytes_read, lines.size)
    except (BackendUnavailable, KeyboardInterrupt) as error:
        # The chunk under way may or may not have been accepted.
        line = lines.next_line
        said = f"{plural(accepted, 'job')} accepted before line {line}, and perhaps some of the next {chunk}"
        hint = "look at `taskharbor stats` before you go on; with --once NAME a file can be sent again"
        raise _stopped(error, said, hint, accepted=accepted, line=line) from error
    if (bad := lines.bad) is not None:
        said = f"{bad}; {plural(accepted, 'job')} before it accepted"
        words = ["-" if one == lines.name else one.replace(f"={lines.name}", "=-") for one in settings.argv]
        again = shlex.join(shown_url(one) if "://" in one else one for one in words)
        rest = f"tail -n +{bad.number} {shlex.quote(lines.name)}"
        hint = f"mend it, then go on from there: {rest} | taskharbor {again}"
        raise BadInput(said, hint=hint, line=bad.number, accepted=accepted)
    _summary(settings, accepted, existed, time.monotonic() - started)


def enqueue_once(settings: Invocation, client: Client, lines: Lines, name: str, show: Show) -> None:
    """Enqueue all lines as one bulk write: staged first, then published. The store remembers the write's name."""
    started = time.monotonic()
    # The colon at the end keeps a name like `load/7` from being number 7 of a series. A later `load/6` would be left out.
    write = f"once:{name}:"
    now, driver, call = client.now(), client.driver, portal().call
    if call(publish_staged.is_over(driver, write)):
        before = call(publish_staged.publish(driver, write, [], now))
        if settings.json:
            emit({"accepted": 0, "new": 0, "existed": 0, "before": before})
        else:
            click.echo(f"{name!r} was used before, for {before} jobs: this file was not read", err=True)
        return
    task, staged = new_id(), 0
    staging = stage.TaskStaging(driver, write, task)
    try:
        for records in lines.chunks(stage.BLOB_JOBS, lambda: now):
            for jobs in stage.chunked([records], stage.BLOB_JOBS):
                call(staging.put(jobs))
            staged += len(records)
            show(f"{staged:,} jobs", lines.bytes_read, lines.size)
        if lines.bad is not None:
            call(staging.drop())
            raise BadInput(f"{lines.bad}; nothing was enqueued", line=lines.bad.number, accepted=0)
        if not staged:
            raise BadInput("there is no job in it; nothing was enqueued, and the name is still free")
        call(staging.complete())
        added = call(publish_staged.publish(driver, write, [task], now))
    except (BackendUnavailable, KeyboardInterrupt) as error:
        hint = "run the same command again: under one name the jobs are enqueued once"
        raise _stopped(error, f"{plural(staged, 'job')} read", hint) from error
    _summary(settings, staged, staged - added, time.monotonic() - started)


def _stopped(error: BaseException, said: str, hint: str, **details: int) -> CommandFailed:
    what, kind, code = str(error), "backend_unavailable", UNAVAILABLE
    if isinstance(error, KeyboardInterrupt):
        what, kind, code = "interrupted", "aborted", INTERRUPTED
    return CommandFailed(f"{what}; {said}", hint=hint, code=code, kind=kind, **details)


def _summary(settings: Invocation, accepted: int, existed: int, seconds: float) -> None:
    if settings.json:
        new = accepted - existed
        emit({"accepted": accepted, "new": new, "existed": existed, "seconds": round(seconds, 3)})
        return
    rate = f", {accepted / seconds:,.0f}/s" if accepted >= 1000 and seconds > 0 else ""
    there = f", {existed} of them there already" if existed else ""
    click.echo(f"{plural(accepted, 'job')} accepted{there} in {seconds:.1f} s{rate}", err=True)
