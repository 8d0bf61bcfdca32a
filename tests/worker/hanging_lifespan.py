"""`hanging_lifespan.py PLACE OPTIONS`: a worker whose app's lifespan hangs at its start or its end, async or sync."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from taskharbor import Harbor

place, options = sys.argv[1], json.loads(sys.argv[2])


def reach(here: str) -> bool:
    if here in place:
        print("here", flush=True)
    return here in place


@asynccontextmanager
async def pool() -> AsyncIterator[None]:
    if reach("start"):
        await asyncio.Event().wait()
    yield
    if reach("end"):
        await asyncio.Event().wait()


@contextmanager
def sync_pool() -> Iterator[None]:
    if reach("start"):
        threading.Event().wait()
    yield
    if reach("end"):
        threading.Event().wait()


harbor = Harbor("memory://", lifespan=sync_pool if "sync" in place else pool)
harbor.worker(every_type=True, **options).run()
