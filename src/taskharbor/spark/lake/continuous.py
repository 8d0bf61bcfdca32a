"""Runs at intervals in one session, and the upkeep that a lake of many small files needs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from taskharbor.errors import BackendUnavailable
from taskharbor.lake.delta import Lake, LakeChanged
from taskharbor.lake.upkeep import compact, vacuum
from taskharbor.spark.lake.run import RunSummary

# Runs with rows. At ten seconds, a date then has at most some hundred small files in each table.
UPKEEP_EVERY = 60


def run_at_intervals(
    lake: Lake,
    run: Callable[[], RunSummary],
    every: timedelta,
    stopping: threading.Event,
    *,
    done: Callable[[RunSummary], None],
    log: Callable[[str], None],
    keep_for: timedelta,
    upkeep_every: int = UPKEEP_EVERY,
) -> None:
    """Run, and tell `done` of each run that wrote something, until `stopping` is set. A store that does not answer, and another
    process that was first, are logged once and waited for."""
    failure, number, seconds = "", 0, every.total_seconds()
    while not stopping.is_set():
        began = time.monotonic()
        try:
            summary = run()
            if summary.tables:
                done(summary)
                number += 1
                if number % upkeep_every == 0:
                    compact(lake)
                    vacuum(lake, keep_for=keep_for)
            failure = ""
        except (BackendUnavailable, LakeChanged) as error:
            if failure != type(error).__name__:
                log(f"{error} (it is tried again every {seconds:g} s)")
            failure = type(error).__name__
        stopping.wait(max(0.0, began + seconds - time.monotonic()))
