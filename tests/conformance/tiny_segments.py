"""An object store with segments of three rows that are merged by twos, and calls that end only when ended jobs are in segments.

So nearly everything that ended is read from the archive by the next call, and what was merged is gone at once.
"""

from collections.abc import Callable
from typing import Any

from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import ObjectStoreOptions, parse_url

TINY = ObjectStoreOptions(poll=None, segment_rows=3, merge=2, levels=3, grace=0.0)
CHANGES = ("enqueue", "reserve", "extend_lease", "settle", "reclaim", "cancel", "requeue", "purge", "prune")


def _then_archived(name: str) -> Callable[..., Any]:
    async def call(self: ObjectStoreDriver, *args: Any, **kwargs: Any) -> Any:
        answer = await getattr(ObjectStoreDriver, name)(self, *args, **kwargs)
        await self.store.settled()
        return answer

    return call


PatientDriver = type("PatientDriver", (ObjectStoreDriver,), {name: _then_archived(name) for name in CHANGES})


def tiny_segments() -> ObjectStoreDriver:
    driver: ObjectStoreDriver = PatientDriver(parse_url("mem://").open, TINY, is_in_memory=True)
    return driver
