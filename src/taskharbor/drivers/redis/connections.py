"""A handle's way to the store: scripts and commands go out in batches, answers come back, and lost answers are resolved.

No background task keeps connections alive. An outage is for the worker to sit out, with its own patience; here a call fails at
once, or is repeated once on a fresh connection where the one it had turned out to be dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import hiredis

from taskharbor.drivers.redis.cluster import Cluster
from taskharbor.drivers.redis.failures import code_of, lost, translated
from taskharbor.drivers.redis.node import Node
from taskharbor.drivers.redis.options import Options
from taskharbor.drivers.redis.packing import (
    WAIT_REPLIES,
    Call,
    Word,
    has_waited,
    not_kept,
    pack,
    pack_call,
    pack_transaction,
    pack_wait,
)
from taskharbor.drivers.redis.sentinel import Sentinels
from taskharbor.drivers.redis.wire import ConnectionLost, Wire
from taskharbor.errors import BackendUnavailable, InvalidRequest

log = logging.getLogger("taskharbor.redis")

OLDEST = (7, 0)
HAS_WAITAOF = (7, 2)


class Facts(NamedTuple):
    version: tuple[int, int]
    is_cluster: bool
    maxmemory: int
    policy: str


def facts_of(info: bytes) -> Facts:
    """From the answer to INFO."""
    lines = info.decode(errors="replace").splitlines()
    said = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    return Facts(
        version=_version(said.get("redis_version", "0.0")),
        is_cluster=said.get("cluster_enabled") == "1" or said.get("redis_mode") == "cluster",
        maxmemory=int(said.get("maxmemory", "0")),
        policy=said.get("maxmemory_policy", "noeviction"),
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = (text.split(".") + ["0"])[:2]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def check(facts: Facts, options: Options, place: str) -> None:
    """Refuse a server that cannot keep jobs, or lacks what the URL asks for."""
    if facts.version < OLDEST:
        raise InvalidRequest(
            f"{place}: Redis {facts.version[0]}.{facts.version[1]} is too old: 7.0 or newer is needed"
        )
    if options.wait_aof is not None and facts.version < HAS_WAITAOF:
        raise InvalidRequest(
            f"{place}: wait_aof needs Redis 7.2, this is {facts.version[0]}.{facts.version[1]}: use wait_replicas"
        )
    # Policies that only touch keys with a time to live cannot hurt: ours have none.
    if not facts.policy.startswith("allkeys") or options.eviction == "accept":
        return
    if facts.maxmemory:
        raise InvalidRequest(
            f"{place}: the server throws away keys of its choice when its memory is full (maxmemory-policy "
            f"{facts.policy}), and with them whole queues: set maxmemory-policy noeviction, or write eviction=accept "
            "if losing jobs is all right"
        )
    log.warning(
        "%s: maxmemory-policy is %s; as soon as somebody sets maxmemory, queues may be thrown away: set noeviction",
        place,
        facts.policy,
    )


Make: TypeAlias = Callable[[int], Sequence[Call]]
"""The calls of an operation. 1 says that an earlier try of the same calls may have taken effect without an answer; as many calls
come, for the same queues in the same order."""

_REDISCOVER = frozenset({"READONLY", "MASTERDOWN"})
"""This is not the master any more: find out who is, and ask there."""


class Connections:
    def __init__(self, options: Options) -> None:
        self.options = options
        self._waits = bool(options.wait_replicas or options.wait_aof is not None)
        self._node: Node | None = None
        self._cluster: Cluster | None = None
        self._news: asyncio.Task[None] | None = None

    @property
    def is_cluster(self) -> bool:
        return self._cluster is not None

    async def open(self) -> None:
        """Connect, and refuse a server that cannot keep jobs. Opening twice is harmless."""
        if self._node is not None or self._cluster is not None:
            return
        options = self.options
        if options.kind == "cluster":
            await self._open_cluster()
            return
        sentinels = Sentinels(options)
        if options.kind == "sentinel":
            node = Node(sentinels.master, options)
        else:
            node = Node.at(options.addresses[0], options)
        try:
            facts = await _facts(await node.connect(), options.place)
            check(facts, options, options.place)
        except BaseException:
            node.close()
            raise
        if facts.is_cluster and options.kind == "single":
            node.close()
            await self._open_cluster()
            return
        self._node = node
        if options.kind == "sentinel":
            self._news = asyncio.get_running_loop().create_task(
                sentinels.tell_of_changes(lambda: node.drop("another server is the master now")),
                name="taskharbor sentinel",
            )

    async def _open_cluster(self) -> None:
        cluster = Cluster(self.options)
        try:
            await cluster.refresh()
            for node in cluster.masters():
                check(await _facts(await node.connect(), str(node.address)), self.options, str(node.address))
        except BaseException:
            cluster.close()
            raise
        self._cluster = cluster

    async def close(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.cancel()
            await asyncio.gather(news, return_exceptions=True)
        node, self._node = self._node, None
        cluster, self._cluster = self._cluster, None
        if node is not None:
            node.close()
        if cluster is not None:
            cluster.close()
        # The event loop closes sockets in its next turn, and there may be none.
        await asyncio.sleep(0)

    def node_for(self, key: str | bytes) -> Node:
        """The server that holds a key."""
        if self._cluster is not None:
            return self._cluster.node_for(key)
        return self._one()

    def when_slots_move(self, callback: Callable[[], None]) -> None:
        """In a cluster, call back when queues may have moved to other nodes."""
        if self._cluster is not None:
            self._cluster.on_change = callback

    def _one(self) -> Node:
        if self._node is None:
            raise BackendUnavailable(
                f"{self.options.place} is not open: await open() first, or use `async with`"
            )
        return self._node

    # -- scripts ------------------------------------------------------------------------------------------

    async def run(self, make: Make) -> list[Any]:
        """The answers of the calls, in order. On one server several are one transaction; in a cluster each stands alone.

        `make(0)` says what to run. Where the connection was lost before the answer came, the same is run once more on a fresh
        one as `make(1)`, and the scripts recognise what their first try did.
        """
        if self._cluster is not None:
            return await self._cluster.run(make)
        node = self._one()
        again = 0
        is_rediscovered = False
        in_full = False
        while True:
            calls = make(again)
            wire = node.wire or await node.connect()
            try:
                if len(calls) == 1 and not self._waits:
                    answers = await wire.ask(pack_call(calls[0], in_full=in_full), 1)
                else:
                    answers = await self._exchange(wire, calls, in_full)
            except ConnectionLost as error:
                node.drop(str(error), after=wire)
                if again:
                    raise lost(error, self.options.place) from None
                again = 1
                continue
            failure = _first_error(answers)
            if failure is None:
                return answers
            code = code_of(failure)
            if code == "NOSCRIPT" and not in_full:
                in_full = True
            elif code in _REDISCOVER and not is_rediscovered:
                is_rediscovered = True
                node.drop(str(failure), after=wire)
            else:
                if code in _REDISCOVER:
                    node.drop(str(failure), after=wire)
                raise translated(failure, self.options.place)

    async def _exchange(self, wire: Wire, calls: Sequence[Call], in_full: bool) -> list[Any]:
        if not calls:
            return []
        wait = pack_wait(self.options, calls) if self._waits else b""
        if len(calls) == 1:
            packed, before = pack_call(calls[0], in_full=in_full), 0
        else:
            packed, before = pack_transaction(calls, in_full=in_full)
        replies = await wire.ask(packed + wait, before + 1 + (WAIT_REPLIES if wait else 0))
        answers: list[Any] = replies[:1]
        if len(calls) > 1:
            said = replies[before]
            # What was wrong is said where the command was refused; EXEC only says that something was.
            answers = [_first_error(replies)] if isinstance(said, hiredis.ReplyError) else said[-len(calls) :]
        if wait and not has_waited(self.options, replies) and _first_error(answers) is None:
            raise not_kept(self.options)
        return answers

    # -- plain commands -----------------------------------------------------------------------------------

    async def command(self, *parts: Word, key: str | None = None) -> Any:
        """The answer to a command that may be repeated. Its key is its second word unless given; without any, every server can
        answer."""
        (answer,) = await self._commands([parts], key)
        return answer

    async def commands(self, many: Sequence[tuple[Word, ...]]) -> list[Any]:
        """The same for several, in one round trip per server. Their keys are their second words."""
        return await self._commands(many, None) if many else []

    async def _commands(self, many: Sequence[tuple[Word, ...]], key: str | None) -> list[Any]:
        if self._cluster is not None:
            return await self._cluster.commands(many, key)
        node = self._one()
        packed = b"".join(map(pack, many))
        tries = 0
        while True:
            wire = node.wire or await node.connect()
            tries += 1
            try:
                answers = await wire.ask(packed, len(many))
            except ConnectionLost as error:
                node.drop(str(error), after=wire)
                if tries > 1:
                    raise lost(error, self.options.place) from None
                continue
            failure = _first_error(answers)
            if failure is None:
                return answers
            if code_of(failure) in _REDISCOVER:
                node.drop(str(failure), after=wire)
                if tries == 1:
                    continue
            raise translated(failure, self.options.place)


def _first_error(answers: Sequence[Any]) -> hiredis.ReplyError | None:
    for answer in answers:
        if isinstance(answer, hiredis.ReplyError):
            return answer
    return None


async def _facts(wire: Wire, place: str) -> Facts:
    try:
        (info,) = await wire.ask(pack(("INFO",)), 1)
    except ConnectionLost as error:
        raise lost(error, place) from None
    if isinstance(info, hiredis.ReplyError):
        raise translated(info, place)
    return facts_of(info)


__all__ = ["Call", "Connections", "Make", "Word"]
