"""One Redis per durability for a whole run of the benchmarks, emptied before every measurement.

The append-only file is on. With `everysec`, which Redis recommends, an answer may come before the disk has it; with `always`
it does not. The file is rewritten between measurements and never during one, which would hit whoever was running.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from taskharbor_testkit.servers import RedisServer
from taskharbor_testkit.servers.redis import Fsync


def server(fsync: Fsync = "everysec") -> RedisServer:
    return _started(fsync)


@functools.cache
def _started(fsync: Fsync) -> RedisServer:
    started = RedisServer.start(appendonly=True, fsync=fsync, config={"auto-aof-rewrite-percentage": "0"})
    atexit.register(started.close)
    return started


def version_started() -> str | None:
    """None where nobody has needed it."""
    return server().version if _started.cache_info().currsize else None


@contextmanager
def fresh_redis(fsync: Fsync = "everysec") -> Iterator[str]:
    """The URL of an empty server."""
    one = server(fsync)
    one.flush()
    settle_down(fsync)
    yield one.url
    one.flush()


def settle_down(fsync: Fsync = "everysec") -> None:
    """Write out what was changed so far, so that nobody pays for whoever was measured before."""
    one = server(fsync)
    one.execute("BGREWRITEAOF")
    one.wait(lambda: _is_calm(one.info("persistence")), "rewrite its append-only file")


def _is_calm(facts: dict[str, str]) -> bool:
    return facts["aof_rewrite_in_progress"] == "0" and facts["aof_rewrite_scheduled"] == "0"


def used_memory(fsync: Fsync = "everysec") -> int:
    return int(server(fsync).info("memory")["used_memory"])
