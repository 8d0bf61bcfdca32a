"""The options that `worker` and `spark-worker` share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import click

from taskharbor.cli.values import DURATION

F = TypeVar("F", bound=Callable[..., Any])

_COUNTS = ("concurrency", "prefetch", "until_empty", "max_jobs")
_DURATIONS = ("lease", "poll_interval", "grace", "max_seconds")


def _duration(name: str, text: str, default: str | None = None) -> Callable[[F], F]:
    return click.option(
        name, default=default, show_default=default is not None, type=DURATION, metavar="DURATION", help=text
    )


_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option(
        "--queue",
        "-q",
        "queues",
        multiple=True,
        metavar="QUEUE",
        help="Serve this queue; repeat.  [default: the app's]",
    ),
    click.option(
        "--type",
        "-t",
        "types",
        multiple=True,
        metavar="TYPE",
        help="Run only this type; repeat.  [default: all]",
    ),
    click.option(
        "--concurrency",
        "-c",
        default=20,
        show_default=True,
        type=click.IntRange(min=1),
        help="Jobs at once, per worker process.",
    ),
    _duration("--lease", "How long the jobs of a worker that died wait.", "15s"),
    _duration("--poll-interval", "Between looks at an idle queue.", "1s"),
    click.option(
        "--prefetch",
        default=4000,
        show_default=True,
        type=click.IntRange(min=0),
        help="Most jobs to lease ahead.",
    ),
    _duration("--grace", "How long a stop waits for jobs.", "30s"),
    click.option("--until-empty", is_flag=True, help="Stop when nothing is left to do."),
    click.option("--max-jobs", type=click.IntRange(min=1), help="Stop each worker after so many jobs."),
    _duration("--max-seconds", "Stop after so long."),
)


def worker_options(command: F) -> F:
    """Add the shared options to a command, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def chosen_options(options: dict[str, Any]) -> dict[str, Any]:
    """The shared options as keyword arguments of `Harbor.worker`; an option that was not given is left out."""
    chosen = {name: options[name] for name in _COUNTS if options[name] is not None}
    for name in _DURATIONS:
        duration: timedelta | None = options[name]
        if duration is not None:
            chosen[name] = duration.total_seconds()
    for name in ("queues", "types"):
        if options[name]:
            chosen[name] = list(options[name])
    return chosen
