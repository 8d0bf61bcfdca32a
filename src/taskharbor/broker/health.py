"""Health of the broker itself: alive, ready, who leads, what time it is."""

from __future__ import annotations

import functools

import taskharbor
from taskharbor.broker.answered import Health, Leader, Time
from taskharbor.broker.operations import Call, Reply, route
from taskharbor.broker.views import instant
from taskharbor.errors import TaskHarborError

_state = functools.partial(route, "GET", tag="broker", on_standby=True)


@_state("/health", "Whether the process lives. Needs no token.", is_public=True)
async def health(call: Call) -> Health:
    return Health(status="alive", version=taskharbor.__version__)


@_state(
    "/ready",
    "Whether this broker answers calls: it leads, and its store answers. Needs no token.",
    is_public=True,
    answer=Health,
    answers=((503, Health),),
)
async def ready(call: Call) -> Health | Reply:
    service = call.service
    if service.stopping.is_set():
        return Reply(503, Health(status="not ready", reason="stopping"))
    if not service.is_leading:
        return Reply(503, Health(status="not ready", reason="standby"))
    try:
        # A leader's term says that the store answers; asking it for the time can be a write.
        if service.leads is None:
            await service.driver.time()
    except (TaskHarborError, OSError):
        return Reply(503, Health(status="not ready", reason="the store does not answer"))
    return Health(status="ready")


@_state("/v1/leader", "Which broker leads.")
async def leader(call: Call) -> Leader:
    service = call.service
    return Leader(service.is_leading, service.leads is not None, service.leader_url)


@_state("/v1/time", "The time that leases are measured by.", on_standby=False)
async def time(call: Call) -> Time:
    now = call.service.now()
    return Time(instant(now), now)
