"""What went wrong, in one line, and the exit code that goes with it.

  0  it worked
  1  it could not be done (no such job, a worker that failed, a check of `doctor` or `demo`)
  2  bad input: an option, a payload, a URL
  3  the backend does not answer
130  interrupted (Ctrl-C)
"""

from __future__ import annotations

import traceback
from typing import Any

import click
import msgspec

from taskharbor.cli.options import Settings
from taskharbor.errors import (
    BackendUnavailable,
    CodecError,
    InvalidRequest,
    JobFinished,
    JobNotDead,
    JobNotFound,
    SchemaMismatch,
    TaskHarborError,
)

FAILED = 1
BAD_INPUT = 2
UNAVAILABLE = 3
INTERRUPTED = 130

_HINTS: tuple[tuple[type[TaskHarborError], str], ...] = (
    (JobNotFound, "`taskharbor list` shows the jobs there are"),
    (JobFinished, "`taskharbor inspect` shows how it ended"),
    (JobNotDead, "`taskharbor dlq list` shows what can be requeued"),
    (SchemaMismatch, "`taskharbor migrate --dry-run` shows what is missing"),
    (BackendUnavailable, "`taskharbor doctor` looks closer"),
)


class Problem(Exception):
    """A problem the command line found itself."""

    def __init__(
        self, message: str, *, hint: str = "", code: int = FAILED, kind: str = "Failed", **details: Any
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code
        self.kind = kind
        self.details = details
        """More for the JSON form: counts, ids."""


class BadInput(Problem):
    def __init__(self, message: str, *, hint: str = "", **details: Any) -> None:
        super().__init__(message, hint=hint, code=BAD_INPUT, kind="BadInput", **details)


def report(error: BaseException, settings: Settings) -> int:
    """Say what happened on stderr; the exit code."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        interrupted = isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)
        _say(
            "interrupted" if interrupted else "aborted, nothing was changed",
            settings,
            kind="Aborted",
            hint="",
        )
        return INTERRUPTED if interrupted else FAILED
    if settings.debug:
        traceback.print_exception(error)
    if isinstance(error, Problem):
        _say(str(error), settings, kind=error.kind, hint=error.hint, **error.details)
        return error.code
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx is not None else "taskharbor"
        _say(
            error.format_message(), settings, kind="UsageError", hint=f"`{where} --help` lists what it takes"
        )
        return BAD_INPUT
    if isinstance(error, click.ClickException):
        _say(error.format_message(), settings, kind=type(error).__name__, hint="")
        return error.exit_code
    if isinstance(error, TaskHarborError):
        _say(str(error), settings, kind=type(error).__name__, hint=hint_for(error))
        return code_for(error)
    kind = type(error).__name__
    hint = "" if settings.debug else "run it again with --debug for the traceback"
    _say(f"{kind}: {error}" if str(error) else kind, settings, kind=kind, hint=hint)
    return FAILED


def code_for(error: TaskHarborError) -> int:
    if isinstance(error, BackendUnavailable):
        return UNAVAILABLE
    return BAD_INPUT if isinstance(error, (InvalidRequest, CodecError)) else FAILED


def hint_for(error: TaskHarborError) -> str:
    return next((hint for kind, hint in _HINTS if isinstance(error, kind)), "")


def _say(message: str, settings: Settings, *, kind: str, hint: str, **details: Any) -> None:
    if settings.json:
        document = {"error": message, "kind": kind, **({"hint": hint} if hint else {}), **details}
        click.echo(msgspec.json.encode(document).decode(), err=True)
        return
    say_error(message)
    if hint:
        click.secho("hint: ", fg="cyan", nl=False, err=True)
        click.echo(hint, err=True)


def say_error(message: str) -> None:
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(message, err=True)
