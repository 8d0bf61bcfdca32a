"""Schedules: cron expressions and intervals, exactly one job per tick, without a leader.

A schedule is a keyed job in the queue `taskharbor.schedules` that never ends. Its `run_at` is its cursor: all ticks before it are
done with. Any worker leases what is due, enqueues the jobs of the ticks and releases the schedule until its next tick. A lease
keeps others away meanwhile. The jobs of ticks have derived ids, so a repeated try after a crash adds none twice.

The modules:

- `tick_ids`: the ids of the jobs that schedules make.
- `times`: the instants of cron expressions and intervals.
- `specification`: a schedule, its checks, and the form in which it is stored.
- `ticking`: makes the jobs of due schedules, as part of the upkeep of workers and brokers.
- `declarations`: schedules that an app declares.
- `client`: puts, lists, pauses, triggers and deletes schedules.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskharbor.schedules.client import AsyncSchedules as AsyncSchedules
    from taskharbor.schedules.client import ScheduleInfo as ScheduleInfo
    from taskharbor.schedules.client import Schedules as Schedules
    from taskharbor.schedules.specification import Schedule as Schedule

# The queue of the schedules' own jobs.
QUEUE = "taskharbor.schedules"
# The type of the schedules' own jobs.
TYPE = "taskharbor.schedule"

__all__ = ["QUEUE", "TYPE", "AsyncSchedules", "Schedule", "ScheduleInfo", "Schedules"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "specification" if name == "Schedule" else "client"
    return getattr(import_module(f"{__name__}.{home}"), name)
