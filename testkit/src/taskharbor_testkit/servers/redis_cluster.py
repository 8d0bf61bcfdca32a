"""A real Redis Cluster on the loopback interface: three masters that share the slots, with replicas when they are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Self

from taskharbor_testkit.servers.ports import HOST
from taskharbor_testkit.servers.redis import RedisServer

SLOTS = 16_384

_SETTINGS = {
    "cluster-enabled": "yes",
    "cluster-announce-ip": HOST,
    # How long until a node that is gone counts as gone: short, because a test waits for it.
    "cluster-node-timeout": "1000",
    "cluster-replica-validity-factor": "0",
}


class RedisCluster:
    """Made by `start()`; a context manager that removes all nodes in the end."""

    def __init__(self) -> None:
        self.nodes: list[RedisServer] = []
        """The masters, in the order of their slots, then their replicas in the same order. Failovers do not reorder them."""
        self.url = ""

    @classmethod
    def start(
        cls,
        *,
        version: str = "newest",
        masters: int = 3,
        replicas: bool = False,
        appendonly: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> Self:
        """Returns when every node says that all slots are served; with `replicas`, each master has one that follows it."""
        cluster = cls()
        settings = {**_SETTINGS, **(config or {})}
        try:
            for _ in range(masters * (2 if replicas else 1)):
                cluster.nodes.append(
                    RedisServer.start(version=version, appendonly=appendonly, config=settings)
                )
            cluster.url = "redis+cluster://" + ",".join(
                f"{HOST}:{node.port}" for node in cluster.nodes[:masters]
            )
            cluster._form(masters)
        except BaseException:
            cluster.close()
            raise
        return cluster

    def slot_of(self, key: str) -> int:
        return int(self._a_running_node().execute("CLUSTER", "KEYSLOT", key))

    def node_of(self, key: str) -> RedisServer:
        """The master that serves the key now, as the first running node sees it."""
        slot = self.slot_of(key)
        port = _port_serving(slot, self._a_running_node())
        return next(node for node in self.nodes if node.port == port)

    def move(self, key: str, target: RedisServer) -> None:
        """Move the slot of this key, with all keys in it, to another master. Clients learn of it by MOVED."""
        slot = self.slot_of(key)
        source = self.node_of(key)
        self.begin_move(key, target)
        while keys := source.execute("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.execute("MIGRATE", HOST, target.port, "", 0, 10_000, "KEYS", *keys)
        for node in self.nodes:
            if node.info("replication")["role"] == "master":
                node.execute("CLUSTER", "SETSLOT", slot, "NODE", _identity(target))

    def begin_move(self, key: str, target: RedisServer) -> None:
        """Only announce it: keys that the slot does not hold are asked for at the target (ASK)."""
        slot = self.slot_of(key)
        source = self.node_of(key)
        target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", _identity(source))
        source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", _identity(target))

    def fail_over(self, key: str) -> RedisServer:
        """In order: the replica of the key's master takes its place, and loses nothing. Returns it."""
        old = self.node_of(key)
        replica = self._replica_of(old)
        replica.catch_up(old)
        replica.execute("CLUSTER", "FAILOVER")
        self._wait_until_served_by(key, replica)
        return replica

    def kill_master(self, key: str) -> RedisServer:
        """SIGKILL. Returns the replica when it has taken over and the others know."""
        old = self.node_of(key)
        replica = self._replica_of(old)
        old.kill()
        self._wait_until_served_by(key, replica)
        return replica

    def flush(self) -> None:
        """Forget every key."""
        for node in self.nodes:
            if node.running and node.info("replication")["role"] == "master":
                node.flush()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _form(self, masters: int) -> None:
        first = self.nodes[0]
        for number, node in enumerate(self.nodes[:masters]):
            slots = range(SLOTS * number // masters, SLOTS * (number + 1) // masters)
            node.execute("CLUSTER", "ADDSLOTS", *slots)
            # Who numbers them beforehand spares them an election.
            node.execute("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.execute("CLUSTER", "MEET", HOST, first.port)
        for node in self.nodes:
            node.wait(partial(self._is_complete, node), "meet the others")
        for master, replica in zip(self.nodes[:masters], self.nodes[masters:], strict=False):
            replica.execute("CLUSTER", "REPLICATE", _identity(master))
        for replica in self.nodes[masters:]:
            replica.wait(partial(_follows, replica), "copy its master")
        for node in self.nodes if self.nodes[masters:] else ():
            node.wait(partial(self._sees_replicas, node, masters), "hear of all replicas")

    def _is_complete(self, node: RedisServer) -> bool:
        facts = _facts(node)
        return facts["cluster_state"] == "ok" and int(facts["cluster_known_nodes"]) == len(self.nodes)

    def _sees_replicas(self, node: RedisServer, masters: int) -> bool:
        return all(node.execute("CLUSTER", "REPLICAS", _identity(master)) for master in self.nodes[:masters])

    def _a_running_node(self) -> RedisServer:
        return next(node for node in self.nodes if node.running)

    def _replica_of(self, master: RedisServer) -> RedisServer:
        identity = _identity(master)
        for line in self._a_running_node().execute("CLUSTER", "REPLICAS", identity):
            port = int(line.split()[1].split(b"@")[0].rpartition(b":")[2])
            return next(node for node in self.nodes if node.port == port)
        raise LookupError("this master has no replica: start the cluster with replicas=True")

    def _wait_until_served_by(self, key: str, node: RedisServer) -> None:
        slot = self.slot_of(key)

        def served() -> bool:
            return all(
                _facts(one)["cluster_state"] == "ok" and _port_serving(slot, one) == node.port
                for one in self.nodes
                if one.running
            )

        node.wait(served, "take over")


def _port_serving(slot: int, seen_by: RedisServer) -> int | None:
    for first, last, (_, port, *_), *_ in seen_by.execute("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return int(port)
    return None


def _identity(node: RedisServer) -> bytes:
    return bytes(node.execute("CLUSTER", "MYID"))


def _facts(node: RedisServer) -> dict[str, str]:
    lines = node.execute("CLUSTER", "INFO").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _follows(node: RedisServer) -> bool:
    facts = node.info("replication")
    return facts["role"] == "slave" and facts.get("master_link_status") == "up"
