"""The options that `worker` and `spark-worker` share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import click

from taskharbor.cli.values import COUNT, DURATION, value_option

F = TypeVar("F", bound=Callable[..., Any])

_COUNTS = ("concurrency", "prefetch", "until_empty", "max_jobs")
_DURATIONS = ("lease", "poll_interval", "grace", "max_seconds")


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
        type=COUNT,
        help="Jobs at once, per worker process.",
    ),
    value_option("--lease", DURATION, "How long the jobs of a worker that died wait.", "15s"),
    value_option("--poll-interval", DURATION, "Between looks at an idle queue.", "1s"),
    value_option("--prefetch", click.IntRange(min=0), "Most jobs to lease ahead.", 4000),
    value_option("--grace", DURATION, "How long a stop waits for jobs.", "30s"),
    click.option("--until-empty", is_flag=True, help="Stop when nothing is left to do."),
    value_option("--max-jobs", COUNT, "Stop each worker after so many jobs."),
    value_option("--max-seconds", DURATION, "Stop after so long."),
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
