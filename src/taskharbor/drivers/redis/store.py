"""What every operation needs: the way to the server, the keys of a queue, and which queues there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from taskharbor.drivers.redis.client import Client
from taskharbor.drivers.redis.keys import Keys, keys_of, queues_key
from taskharbor.drivers.redis.library import Call, Word
from taskharbor.drivers.redis.listener import Listener
from taskharbor.jobs import Micros


class Store:
    """A store as one open handle sees it."""

    def __init__(self, client: Client) -> None:
        options = client.options
        self.client = client
        self.listener = Listener(client, self.keys)
        self.prefix = options.prefix
        self._notify = options.notify
        self._queues_key = queues_key(options.prefix)
        self.numbers: dict[str, int] = {}
        """The queues known so far and their numbers. They are never taken back."""
        self._last_heard: Sequence[bytes] = ()

    def keys(self, queue: str) -> Keys:
        return keys_of(self.prefix, queue)

    def call(self, name: str, queue: str, now: Micros, *args: Word) -> Call:
        """A script on the keys of a queue."""
        keys = keys_of(self.prefix, queue)
        return Call(name, keys.all, (keys.channel if self._notify else "", now, *args))

    async def ask_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers of calls that may be repeated as they are."""
        return await self.client.run(lambda _: calls)

    async def ask(self, name: str, queue: str, now: Micros, *args: Word) -> Any:
        """The answer of a script that may be repeated as it is."""
        (answer,) = await self.ask_all((self.call(name, queue, now, *args),))
        return answer

    # -- queues -------------------------------------------------------------------------------------------

    async def register(self, queues: Iterable[str]) -> None:
        """Before a queue gets its first job or setting: what is not written down here is found by nobody."""
        (answer,) = await self.ask_all((Call("register", (self._queues_key,), tuple(queues)),))
        self._learn(answer)

    async def queues(self) -> dict[str, int]:
        """All there are now, with their numbers."""
        self._learn(await self.client.command("HGETALL", self._queues_key))
        return self.numbers

    def _learn(self, pairs: Sequence[bytes]) -> None:
        if pairs != self._last_heard:
            self._last_heard = pairs
            names = [name.decode() for name in pairs[::2]]
            self.numbers = dict(zip(names, map(int, pairs[1::2]), strict=True))

    async def located(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Job id -> the queue that has it, of those that any queue has."""
        found: dict[str, str] = {}
        if not job_ids:
            return found
        wanted = list(dict.fromkeys(job_ids))
        names = list(await self.queues())
        answers = await self.client.commands(
            [("ZMSCORE", self.keys(name)["jobs"], *wanted) for name in names]
        )
        for name, scores in zip(names, answers, strict=True):
            for job_id, score in zip(wanted, scores, strict=True):
                if score is not None:
                    found[job_id] = name
        return found
