"""The broker itself: alive, ready, who leads, what time it is."""

from __future__ import annotations

import taskharbor
from taskharbor.broker.answered import Health, Leader, Time
from taskharbor.broker.operations import Call, Operation, Reply
from taskharbor.broker.views import instant
from taskharbor.errors import TaskHarborError


async def health(call: Call) -> Health:
    return Health(status="alive", version=taskharbor.__version__)


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


async def leader(call: Call) -> Leader:
    service = call.service
    return Leader(service.is_leading, service.leads is not None, service.leader_url)


async def time(call: Call) -> Time:
    now = call.service.now()
    return Time(instant(now), now)


OPERATIONS = (
    Operation(
        method="GET",
        path="/health",
        name="health",
        summary="Whether the process lives. Needs no token.",
        tag="broker",
        handle=health,
        is_public=True,
        on_standby=True,
        answer=Health,
    ),
    Operation(
        method="GET",
        path="/ready",
        name="ready",
        summary="Whether this broker answers calls: it leads, and its store answers. Needs no token.",
        tag="broker",
        handle=ready,
        is_public=True,
        on_standby=True,
        answer=Health,
        answers=((503, Health),),
    ),
    Operation(
        method="GET",
        path="/v1/leader",
        name="leader",
        summary="Which broker leads.",
        tag="broker",
        handle=leader,
        on_standby=True,
        answer=Leader,
    ),
    Operation(
        method="GET",
        path="/v1/time",
        name="time",
        summary="The time that leases are measured by.",
        tag="broker",
        handle=time,
        answer=Time,
    ),
)
