"""Settings of queues as an app and an operator write them: by field, with durations as `timedelta` or seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypedDict

import msgspec

from taskharbor.drivers.contract import Driver, QueueSettings
from taskharbor.drivers.operations import Configure
from taskharbor.drivers.validation import check
from taskharbor.errors import InvalidRequest, QueueNotFound
from taskharbor.jobs import Micros
from taskharbor.requests import as_duration

log = logging.getLogger("taskharbor")


class QueueOptions(TypedDict, total=False):
    """Settings of a queue. None: no limit, no failure queue, kept for ever."""

    paused: bool
    max_inflight: int | None
    failure_queue: str | None
    keep_done: timedelta | float | None
    keep_dead: timedelta | float | None
    keep_attempts: timedelta | float | None


def changing(queue: str, options: Mapping[str, Any], now: Micros = 0) -> Configure:
    """Return the checked call that changes these settings and no others. Raises InvalidRequest; TypeError for an unknown one."""
    if unknown := options.keys() - QueueOptions.__annotations__.keys():
        names = ", ".join(QueueOptions.__annotations__)
        raise TypeError(f"unknown setting {', '.join(sorted(unknown))} of queue {queue!r}; known: {names}")
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name.startswith("keep_"):
            given[f"{name}_us"] = us = None if value is None else as_duration(name, value)
            if us is not None and us < 0:
                raise InvalidRequest(f"{name} {value!r}: 0 or more; None keeps for ever")
        else:
            given[name] = value
    return check(Configure(queue, QueueSettings(**given), now, list(given)))  # type: ignore[arg-type]


async def check_known(driver: Driver, queue: str, now: Micros) -> None:
    """Raise QueueNotFound if the store has never had a job or a setting for the queue."""
    if all(one.queue != queue for one in await driver.stats(now=now)):
        raise QueueNotFound(queue)


async def declare(driver: Driver, queue: str, options: Mapping[str, Any], now: Micros) -> None:
    """Apply those settings of a declaration that differ from what was declared last, each on its own. The store keeps what was
    declared, by all apps that share the queue."""
    call = changing(queue, options, now)
    stored = (await driver.settings(queue)).declaration
    applied = msgspec.json.decode(stored or "{}")
    wanted = {field: getattr(call.settings, field) for field in call.fields or ()}
    changed = [field for field, value in wanted.items() if field not in applied or applied[field] != value]
    if changed or stored is None:  # A declared queue is known, even one without settings.
        text = msgspec.json.encode({**applied, **wanted}, order="sorted").decode()
        settings = msgspec.structs.replace(call.settings, declaration=text)
        await driver.configure(queue, settings, now=now, fields=changed, declares=True)
        given = (field.removesuffix("_us") for field in changed)
        log.info("queue %s: declared %s", queue, ", ".join(f"{name}={options[name]}" for name in given))
