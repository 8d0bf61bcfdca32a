"""How a worker's types are shared out: a batch type has an engine to itself, all others together have one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from taskharbor.batch_jobs.handler import BatchHandler
from taskharbor.clock import Clock
from taskharbor.drivers.contract import Driver
from taskharbor.handlers import Handler
from taskharbor.worker.engine import Engine, Runs, WorkerConfig


class Share(NamedTuple):
    """What one engine serves; `batch` is None where jobs run one by one."""

    config: WorkerConfig
    batch: BatchHandler | None


class Crew(NamedTuple):
    """A share with what serves it."""

    config: WorkerConfig
    driver: Driver
    clock: Clock
    runner: Runs


def share_out(config: WorkerConfig, handlers: Iterable[Handler]) -> list[Share]:
    known = list(handlers)
    # A claim cannot leave types out: where one is for batches, all others are named.
    types = tuple(handler.type for handler in known) if config.types is None else config.types
    batched = [handler for handler in known if isinstance(handler, BatchHandler) and handler.type in types]
    if not batched:
        return [Share(config, None)]
    taken = {handler.type for handler in batched}
    singles = tuple(type for type in types if type not in taken)
    config = msgspec.structs.replace(config, types=types, claims=singles)
    shares = [Share(config, None)] if singles else []
    for handler in batched:
        # As many as go into one call, and no more ahead: what arrives meanwhile goes into the next.
        own = msgspec.structs.replace(
            config, claims=(handler.type,), concurrency=handler.size, prefetch=0, batch=handler.size
        )
        shares.append(Share(own, handler))
    return shares


async def run_together(engines: Sequence[Engine]) -> None:
    """Until all have ended. One that fails ends the others, gracefully."""
    if len(engines) == 1:
        await engines[0].run()
        return
    running = [asyncio.ensure_future(engine.run()) for engine in engines]
    await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
    for engine, task in zip(engines, running, strict=True):
        if not task.done():
            engine.ask_to_stop()
    await asyncio.gather(*running)
