"""Schedules that an app declares: completed by the declarations of their jobs, and stored when a worker starts."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from taskharbor.drivers.contract import Driver
from taskharbor.errors import Forbidden
from taskharbor.jobs import Micros, to_datetime
from taskharbor.schedules.client import put
from taskharbor.schedules.specification import FILLED, Schedule, StoredSchedule, request_of, stored_schedule

if TYPE_CHECKING:
    from taskharbor.harbor import Harbor

log = logging.getLogger("taskharbor.schedules")


def complete(harbor: Harbor, schedule: Schedule, origin: str | None = None) -> partial[StoredSchedule]:
    """Complete a schedule by the declaration of its job, and check it. What is stored also needs the time: `now`."""
    request, fills = request_of(schedule), tuple[str, ...]()
    declared = harbor.jobs.get(schedule.job)
    if declared is not None and declared.handler.arguments is not None:
        known = declared.handler.arguments.type.__struct_fields__
        fills = tuple(one for one in FILLED if one in known and one not in request.payload)
        # Any instant will do to check the call.
        request.payload, request.codec = {**request.payload, **dict.fromkeys(fills, to_datetime(0))}, "json"
        request = declared._completed(request)
        encoded = msgspec.json.decode(request.payload.data)
        request.payload = {name: value for name, value in encoded.items() if name not in fills}
    stored = partial(stored_schedule, schedule, request, harbor._builder, fills=fills, origin=origin)
    stored(now=0)
    return stored


async def put_declared(harbor: Harbor, driver: Driver, now: Micros) -> None:
    """Store all schedules that the app declares, as far as the store lets this caller."""
    for name, declared in harbor.schedules.items():
        try:
            await put(driver, declared(now=now), now)
        except Forbidden as error:
            log.warning("the declaration of schedule %s is not applied: %s", name, error)


def origin_of(module: str) -> str:
    """Return the top package of a module; of a script the name under which a worker imports it."""
    if module == "__main__":
        main = sys.modules["__main__"]
        file = os.path.basename(getattr(main, "__file__", None) or module)
        module = main.__spec__.name if main.__spec__ else file.removesuffix(".py")
    return module.partition(".")[0]


def origins(harbor: Harbor) -> set[str]:
    """Return the top packages of the code that declares this app's jobs and schedules."""
    modules = {origin_of(job.__wrapped__.__module__) for job in harbor.jobs.values()}
    return modules | {declared.keywords["origin"] for declared in harbor.schedules.values()}
