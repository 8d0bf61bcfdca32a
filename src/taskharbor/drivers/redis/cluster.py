"""The nodes of a Redis Cluster, and which of them holds what.

All keys of a queue are in one slot, so each call goes to one node and is atomic there. Calls for several queues go out at the
same time, and each stands alone: one may fail while the others took effect, and all of them may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hiredis

from taskharbor.drivers.redis.errands import SLOTS, CallErrand, CommandErrand, Errand, slot_of
from taskharbor.drivers.redis.failures import code_of, lost, translated
from taskharbor.drivers.redis.node import Node
from taskharbor.drivers.redis.options import Address, Options
from taskharbor.drivers.redis.packing import Call, Word, pack
from taskharbor.drivers.redis.wire import ConnectionLost
from taskharbor.errors import BackendUnavailable


class Cluster:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._nodes: dict[Address, Node] = {}
        self._by_slot: list[Node | None] = [None] * SLOTS
        self._refreshing: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when slots may have moved."""

    def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
        for node in self._nodes.values():
            node.close()

    def masters(self) -> list[Node]:
        return list(dict.fromkeys(node for node in self._by_slot if node is not None))

    def node_for(self, key: str | bytes) -> Node:
        return self._at_slot(slot_of(key))

    def _at_slot(self, slot: int) -> Node:
        node = self._by_slot[slot]
        if node is None:
            raise BackendUnavailable(
                f"{self._options.place}: no node of the cluster serves slot {slot}: look at CLUSTER INFO"
            )
        return node

    # -- who holds what -----------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Ask any node that answers. Who comes while another asks shares its answer."""
        if self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(self._refreshed)
        await asyncio.shield(self._refreshing)

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled():
            task.exception()

    async def _refresh(self) -> None:
        troubles: list[str] = []
        for address in dict.fromkeys((*self._nodes, *self._options.addresses)):
            node = self._nodes.get(address) or Node.at(address, self._options)
            try:
                (answer,) = await (node.wire or await node.connect()).ask(pack(("CLUSTER", "SLOTS")), 1)
            except (BackendUnavailable, ConnectionLost) as error:
                troubles.append(str(error))
                continue
            finally:
                if address not in self._nodes:
                    node.close()
            if isinstance(answer, hiredis.ReplyError):
                raise translated(answer, str(address))
            if not answer:
                troubles.append(f"{address} serves no slots")
                continue
            self._take_over(answer, address)
            return
        raise BackendUnavailable(
            f"{self._options.place}: no node of the cluster answers: {'; '.join(troubles)}"
        )

    def _take_over(self, ranges: list[Any], asked: Address) -> None:
        by_slot: list[Node | None] = [None] * SLOTS
        for first, last, master, *_replicas in ranges:
            node = self._node(_address(master, asked))
            by_slot[first : last + 1] = [node] * (last + 1 - first)
        is_changed = by_slot != self._by_slot
        self._by_slot = by_slot
        current = set(self.masters())
        for address, node in list(self._nodes.items()):
            if node not in current:
                del self._nodes[address]
                node.close()
        if is_changed:
            self.on_change()

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node.at(address, self._options)
        return node

    # -- errands ------------------------------------------------------------------------------------------

    async def run(self, make: Callable[[int], Sequence[Call]]) -> list[Any]:
        first = make(0)
        repeated: list[Sequence[Call]] = []

        def repetition() -> Sequence[Call]:
            if not repeated:
                repeated.append(make(1))
            return repeated[0]

        errands = [CallErrand(call, place, repetition, self._options) for place, call in enumerate(first)]
        await self._carry_out(errands)
        return [errand.answer for errand in errands]

    async def commands(self, many: Sequence[tuple[Word, ...]], key: str | None) -> list[Any]:
        errands = [CommandErrand(parts, key) for parts in many]
        await self._carry_out(errands)
        return [errand.answer for errand in errands]

    async def _carry_out(self, errands: Sequence[Errand]) -> None:
        """Send each to its node, and on from there, until all are answered; raises the first failure once the others are
        done."""
        left = list(errands)
        while left:
            groups: dict[Node, list[Errand]] = {}
            for errand in left:
                groups.setdefault(errand.sent_on_to or self._holder(errand.slot), []).append(errand)
            visits = [self._visit(node, group) for node, group in groups.items()]
            await (visits[0] if len(visits) == 1 else asyncio.gather(*visits))
            left = [errand for errand in left if not errand.is_done]
            if any(errand.is_lost_way for errand in left):
                await self.refresh()
        for errand in errands:
            if errand.failure is not None:
                raise errand.failure

    def _holder(self, slot: int | None) -> Node:
        if slot is not None:
            return self._at_slot(slot)
        masters = self.masters()
        if not masters:
            return self._at_slot(0)
        return next((node for node in masters if node.wire is not None), masters[0])

    async def _visit(self, node: Node, errands: Sequence[Errand]) -> None:
        place = str(node.address)
        for errand in errands:
            errand.sent_on_to = None
        try:
            wire = node.wire or await node.connect()
        except BackendUnavailable as error:
            for errand in errands:
                errand.was_not_received(error)
            return
        packed = [errand.packed() for errand in errands]
        try:
            replies = await wire.ask(b"".join(packed), sum(errand.replies for errand in errands))
        except ConnectionLost as error:
            node.drop(str(error), after=wire)
            for errand in errands:
                errand.lost_answer(lost(error, place))
            return
        at = 0
        for errand in errands:
            count = errand.replies
            trouble = errand.take(replies[at : at + count])
            at += count
            if trouble is None:
                continue
            code = code_of(trouble)
            if code in ("MOVED", "ASK") and errand.may_go_on():
                _, _, target = str(trouble).split(" ")[:3]
                errand.sent_on_to = self._node(_target(target, node))
                errand.asking = code == "ASK"
                errand.is_lost_way = code == "MOVED"
            elif code == "NOSCRIPT" and errand.with_text():
                continue
            elif code in ("READONLY", "MASTERDOWN") and errand.may_go_on():
                node.drop(str(trouble), after=wire)
                errand.is_lost_way = True
            else:
                errand.failure = translated(trouble, place)


def _address(described: list[Any], asked: Address) -> Address:
    """A node as CLUSTER SLOTS describes it. One that does not know its own name is at the address it was asked at."""
    host, port = described[0], described[1]
    name = host.decode() if host else ""
    return Address(asked.host if name in ("", "?") else name, port)


def _target(text: str, from_node: Node) -> Address:
    host, _, port = text.rpartition(":")
    assert from_node.address is not None
    return Address(host or from_node.address.host, int(port))
