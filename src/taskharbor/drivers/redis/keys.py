"""The keys of a queue. All share the hash tag `{queue}`: a cluster keeps a queue in one place, and a transition is one call.

`lua/queue.lua` names them and says what each holds.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from taskharbor.drivers.redis.library import lua

FAMILIES: Final = tuple(re.findall(r"^local (\w+) +-- (?:zset|hash|list|stream)", lua("queue"), re.MULTILINE))
"""Every function that works on a queue gets all of them, in this order."""


class Keys:
    """One queue's keys, and the channel on which it wakes those who wait."""

    __slots__ = ("all", "channel", "prefix", "queue")

    def __init__(self, prefix: str, queue: str) -> None:
        self.prefix = f"{prefix}{{{tag(queue)}}}:"
        self.queue = queue
        self.all = tuple(f"{self.prefix}{family}" for family in FAMILIES)
        self.channel = f"{self.prefix}wake"

    def __getitem__(self, family: str) -> str:
        return f"{self.prefix}{family}"


@lru_cache(maxsize=10_000)
def keys_of(prefix: str, queue: str) -> Keys:
    return Keys(prefix, queue)


def tag(queue: str) -> str:
    """A name as it stands between the braces: never empty and never cut short by a brace of its own."""
    return queue.replace("%", "%25").replace("}", "%7D") or "%"


def queues_key(prefix: str) -> str:
    """The hash of all queues: name -> number."""
    return f"{prefix}taskharbor:queues"
