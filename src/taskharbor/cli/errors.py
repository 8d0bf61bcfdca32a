"""Errors of commands, in one line each, and the exit codes.

  0  it worked
  1  it could not be done (no such job, a worker that failed, a check of `doctor` or `demo`)
  2  bad input: an option, a payload, a URL
  3  the backend does not answer
  4  a worker lost threads to handlers that do not come back: start it again
  5  the pipeline's run is done, and rows of the log went into quarantine
130  interrupted (Ctrl-C)
143  the pipeline was interrupted by SIGTERM
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import click

from taskharbor import errors
from taskharbor.broker.models import error_code
from taskharbor.printable import printable, printable_json

if TYPE_CHECKING:
    from taskharbor.cli.options import Invocation

FAILED = 1
BAD_INPUT = 2
UNAVAILABLE = 3
WORN_OUT = 4
QUARANTINED = 5
INTERRUPTED = 130
TERMINATED = 143

_ANSWERS: tuple[tuple[type[errors.TaskHarborError], int, str], ...] = (
    (errors.ThreadsLost, WORN_OUT, ""),
    (errors.BackendUnavailable, UNAVAILABLE, "`taskharbor doctor` looks closer"),
    (errors.InvalidRequest, BAD_INPUT, ""),
    (errors.CodecError, BAD_INPUT, ""),
    (errors.JobNotFound, FAILED, "`taskharbor list` shows the jobs there are"),
    (errors.JobFinished, FAILED, "`taskharbor inspect` shows how it ended"),
    (errors.JobNotDead, FAILED, "`taskharbor dlq list` shows what can be requeued"),
    (errors.SchemaMismatch, FAILED, "`taskharbor migrate --dry-run` shows what is missing"),
    (errors.TaskHarborError, FAILED, ""),
)
"""Exit code and hint by the kind of error. The first that fits counts."""


class CommandFailed(Exception):
    """A problem the command line found itself. `details`: more for the JSON form, like counts and ids."""

    code = FAILED
    kind = "failed"

    def __init__(
        self, message: str, *, hint: str = "", code: int = 0, kind: str = "", **details: Any
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code or self.code
        self.kind = kind or self.kind
        self.details = details


class BadInput(CommandFailed):
    """Input that cannot be used: exit code 2."""

    code = BAD_INPUT
    kind = "bad_input"


def report(error: BaseException, settings: Invocation) -> int:
    """Print the error on stderr, and return the exit code."""
    if settings.debug and not isinstance(error, (KeyboardInterrupt, click.Abort)):
        traceback.print_exception(error)
    problem = error if isinstance(error, CommandFailed) else _problem_of(error, settings)
    message, hint = str(problem), problem.hint
    if settings.json:
        advice = {"hint": hint} if hint else {}
        document = {"error": {"code": problem.kind, "detail": message, **advice}, **problem.details}
        click.echo(printable_json(document), err=True)
        return problem.code
    say_error(message)
    if hint:
        click.secho("hint: ", fg="cyan", nl=False, err=True)
        click.echo(printable(hint), err=True)
    return problem.code


def _problem_of(error: BaseException, settings: Invocation) -> CommandFailed:
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
            return CommandFailed("interrupted", code=INTERRUPTED, kind="aborted")
        return CommandFailed("aborted, nothing was changed", kind="aborted")
    kind, name = error_code(type(error)), type(error).__name__
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx is not None else "taskharbor"
        hint = f"`{where} --help` lists what it takes"
        said = error.format_message().replace("a valid integer range", "a whole number")
        return CommandFailed(said, hint=hint, code=BAD_INPUT, kind="usage_error")
    if isinstance(error, click.ClickException):
        return CommandFailed(error.format_message(), code=error.exit_code, kind=kind)
    for one, code, hint in _ANSWERS:
        if isinstance(error, one):
            return CommandFailed(str(error), hint=hint, code=code, kind=kind)
    hint = "" if settings.debug else "run it again with --debug for the traceback"
    return CommandFailed(f"{name}: {error}" if str(error) else name, hint=hint, kind=kind)


def say_error(message: str) -> None:
    """An error message on stderr."""
    click.secho("error: ", fg="red", bold=True, nl=False, err=True)
    click.echo(printable(message), err=True)
