"""Many jobs from JSON lines, in chunks: memory stays flat and a bad line stops it at a place one can go on from."""

from __future__ import annotations

import io
import os
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import click
import msgspec

from taskharbor.bulk import publish, stage
from taskharbor.cli.output import console, emit
from taskharbor.cli.problems import INTERRUPTED, UNAVAILABLE, BadInput, Problem
from taskharbor.cli.settings import Settings
from taskharbor.cli.store import open_client
from taskharbor.client import Client, chunks, portal
from taskharbor.drivers.contract import Enqueued
from taskharbor.errors import BackendUnavailable, CodecError, InvalidRequest
from taskharbor.jobs import JobRequest, UpdateFlags, UpdateRunAt
from taskharbor.requests import RecordBuilder, new_id

if TYPE_CHECKING:
    from rich.progress import Progress

LONGEST_LINE = 4 * 1024 * 1024


class Update(msgspec.Struct, forbid_unknown_fields=True):
    """The update flags by name, as a person writes them."""

    payload: bool = True
    run_at: UpdateRunAt = "no"
    retry: bool = False
    reset_counts: bool = False


class Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A line of the file: the fields of `JobRequest`. An unknown field is a typo that would otherwise be lost."""

    type: str
    payload: Any = msgspec.field(default_factory=dict)
    queue: str | None = None
    run_at: datetime | None = None
    delay: timedelta | float | None = None
    timeout: timedelta | float | None = None
    priority: int | None = None
    key: str | None = None
    update: Update | None = None
    idempotency_key: str | None = None
    max_attempts: int | None = None
    max_stalls: int | None = None
    backoff: tuple[float, float] | None = None
    headers: dict[str, str] | None = None
    codec: str | None = None

    def request(self) -> JobRequest:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.update is not None:
            fields["update"] = UpdateFlags(*msgspec.structs.astuple(self.update))
        return JobRequest(**fields)


_decode = msgspec.json.Decoder(Line).decode


class BadLine(Exception):
    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"line {number}: {reason}")
        self.number = number


class Lines:
    """Requests from a file, remembering which line each came from until its chunk is answered.

    A line that cannot be read ends the iteration instead of breaking it, so that what stood before it is still sent.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes_read = 0
        self.pending: deque[tuple[int, JobRequest]] = deque()
        self.bad: BadLine | None = None

    def __iter__(self) -> Iterator[JobRequest]:
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
                request = _decode(raw).request()
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.bad = BadLine(number, str(error))
                return
            self.pending.append((number, request))
            yield request


def enqueue_lines(settings: Settings, source: BinaryIO, *, chunk: int, ids: bool) -> None:
    """Chunk by chunk: each is accepted before the next is read."""
    lines = Lines(source)
    started = time.monotonic()
    accepted = existed = 0
    bad: BadLine | None = None
    with open_client(settings, creating=True) as client, Meter(source, settings) as meter:
        try:
            for batch in client.enqueue_stream(lines, chunk=chunk):
                lines.pending.clear()
                accepted += len(batch)
                existed += sum(one.existed for one in batch)
                _print_ids(batch, settings, ids)
                meter.show(accepted, lines.bytes_read)
            bad = lines.bad
        except (BackendUnavailable, KeyboardInterrupt) as error:
            # The chunk under way may have been accepted or not.
            line = lines.pending[0][0] if lines.pending else 1
            said = f"{accepted} jobs before line {line} were accepted, of the next {chunk} some may be"
            hint = "look at `taskharbor stats` before you go on; with --once NAME a file can be sent again"
            raise _stopped(error, said, hint, accepted=accepted, line=line) from error
        except (InvalidRequest, CodecError):
            # The chunk was refused as a whole: accept what stands before the line that is to blame.
            good, bad = _blame(lines, client)
            batch = client.enqueue_batch(good) if good else []
            accepted += len(batch)
            existed += sum(one.existed for one in batch)
            _print_ids(batch, settings, ids)
    if bad is not None:
        raise BadInput(
            f"{bad}; {accepted} jobs before it were accepted",
            hint=f"mend it, then go on from there: tail -n +{bad.number} FILE | taskharbor enqueue --from -",
            line=bad.number,
            accepted=accepted,
        )
    _summary(settings, accepted, existed, time.monotonic() - started)


def enqueue_once(settings: Settings, source: BinaryIO, name: str) -> None:
    """All lines as one bulk write: staged first, then published. The store remembers the write's name."""
    lines = Lines(source)
    started = time.monotonic()
    # The end keeps a name like `load/7` from being number 7 of a series: that would leave out `load/6` afterwards.
    write = f"once:{name}:"
    with open_client(settings, creating=True) as client, Meter(source, settings) as meter:
        now, driver, call = client.now(), client.driver, portal().call
        if call(publish.is_over(driver, write)):
            before = call(publish.publish(driver, write, [], now))
            if settings.json:
                emit({"accepted": 0, "new": 0, "existed": 0, "before": before})
            else:
                click.echo(f"{name!r} was used before, for {before} jobs: this file was not read", err=True)
            return
        task, builder, staged = new_id(), RecordBuilder(), 0
        staging = stage.TaskStaging(driver, write, task)
        try:
            for batch in chunks(lines, stage.BLOB_JOBS):
                try:
                    records = builder.build(batch, now)
                except (InvalidRequest, CodecError):
                    lines.bad = _blame(lines, client)[1]
                    break
                for jobs in stage.chunked([records], stage.BLOB_JOBS):
                    call(staging.put(jobs))
                lines.pending.clear()
                staged += len(batch)
                meter.show(staged, lines.bytes_read)
            if lines.bad is not None:
                call(staging.drop())
                raise BadInput(f"{lines.bad}; nothing was enqueued", line=lines.bad.number, accepted=0)
            if not staged:
                raise BadInput("there is no job in it; nothing was enqueued, and the name is still free")
            call(staging.complete())
            added = call(publish.publish(driver, write, [task], now))
        except (BackendUnavailable, KeyboardInterrupt) as error:
            hint = "run the same command again: under one name the jobs are enqueued once"
            raise _stopped(error, f"{staged} jobs were read", hint) from error
    _summary(settings, staged, staged - added, time.monotonic() - started)


def _stopped(error: BaseException, said: str, hint: str, **details: int) -> Problem:
    is_interrupt = isinstance(error, KeyboardInterrupt)
    return Problem(
        f"{'interrupted' if is_interrupt else error}; {said}",
        hint=hint,
        code=INTERRUPTED if is_interrupt else UNAVAILABLE,
        kind="Aborted" if is_interrupt else "BackendUnavailable",
        **details,
    )


def _summary(settings: Settings, accepted: int, existed: int, seconds: float) -> None:
    if settings.json:
        new = accepted - existed
        emit({"accepted": accepted, "new": new, "existed": existed, "seconds": round(seconds, 3)})
        return
    rate = f", {accepted / seconds:,.0f}/s" if accepted >= 1000 and seconds > 0 else ""
    there = f", {existed} of them there already" if existed else ""
    click.echo(f"{accepted} jobs accepted{there} in {seconds:.1f} s{rate}", err=True)


def _blame(lines: Lines, client: Client) -> tuple[list[JobRequest], BadLine]:
    builder, now = RecordBuilder(), client.now()
    good: list[JobRequest] = []
    for number, request in lines.pending:
        try:
            builder.build([request], now)
        except (InvalidRequest, CodecError) as error:
            return good, BadLine(number, str(error))
        good.append(request)
    raise AssertionError("a chunk was refused, and none of its lines is to blame")


def _print_ids(batch: list[Enqueued], settings: Settings, ids: bool) -> None:
    if not ids:
        return
    for one in batch:
        if settings.json:
            emit({"id": one.id, "existed": one.existed})
        else:
            click.echo(one.id)


class Meter:
    """A progress bar on stderr, where somebody looks: by bytes of a file, by count of a pipe."""

    def __init__(self, source: BinaryIO, settings: Settings) -> None:
        self._total = _size(source)
        self._progress: Progress | None = None
        screen = console(stderr=True)
        if screen.is_terminal and not settings.json:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
            self._progress = Progress(*columns, console=screen, transient=True)
            self._task = self._progress.add_task("0 jobs", total=self._total)

    def show(self, accepted: int, bytes_read: int) -> None:
        if self._progress is not None:
            done = bytes_read if self._total else None
            self._progress.update(self._task, description=f"{accepted:,} jobs", completed=done)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _size(source: BinaryIO) -> int | None:
    try:
        return os.fstat(source.fileno()).st_size or None
    except (OSError, io.UnsupportedOperation, AttributeError):
        return None
