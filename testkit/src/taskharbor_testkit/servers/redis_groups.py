"""Redis on several servers, as real ones on the loopback interface: a Cluster, and a master and replica behind Sentinels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from taskharbor_testkit.servers.discovery import find_redis
from taskharbor_testkit.servers.process import HOST, Closing, once
from taskharbor_testkit.servers.redis import PRIVATE, RedisServer

_SLOTS = 16_384
_MASTERS = 3

_SETTINGS = {
    "cluster-enabled": "yes",
    "cluster-announce-ip": HOST,
    # Milliseconds until a node that is gone counts as gone: few, because a test waits for it.
    "cluster-node-timeout": "1000",
    "cluster-replica-validity-factor": "0",
}
_SERVICE = "harbor"
_SENTINELS = 3


class RedisCluster(Closing):
    """Three masters that share the slots, with replicas where a test wants them.

    Made by `start()`; a context manager that removes all nodes in the end.
    """

    def __init__(self) -> None:
        self.nodes: list[RedisServer] = []
        """The masters, in the order of their slots, then their replicas in the same order. Failovers do not reorder them."""
        self.url = ""

    @classmethod
    def start(cls, *, version: str = "newest", replicas: bool = False) -> Self:
        """Returns when every node says that all slots are served; with `replicas`, each master has one that follows it."""
        cluster = cls()
        for _ in range(2 * _MASTERS if replicas else _MASTERS):
            cluster.nodes.append(RedisServer.start(version=version, config=_SETTINGS))
        addresses = [f"{HOST}:{node.port}" for node in cluster.nodes[:_MASTERS]]
        cluster.url = f"redis+cluster://{','.join(addresses)}"
        cluster._form()
        return cluster

    def slot_of(self, key: str) -> int:
        return int(self._a_running_node().execute("CLUSTER", "KEYSLOT", key))

    def node_of(self, key: str) -> RedisServer:
        """The master that serves the key now, as the first running node sees it."""
        return self._node_at(_port_serving(self.slot_of(key), self._a_running_node()))

    def move(self, key: str, target: RedisServer) -> None:
        """Move the slot of this key, with all keys in it, to another master. Clients learn of it by MOVED."""
        slot = self.slot_of(key)
        source = self.node_of(key)
        self.begin_move(key, target)
        while keys := source.execute("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.execute("MIGRATE", HOST, target.port, "", 0, 10_000, "KEYS", *keys)
        for node in self.nodes:
            if node.is_master():
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
            if node.running and node.is_master():
                node.flush()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _form(self) -> None:
        masters, replicas = self.nodes[:_MASTERS], self.nodes[_MASTERS:]
        for number, node in enumerate(masters):
            slots = range(_SLOTS * number // _MASTERS, _SLOTS * (number + 1) // _MASTERS)
            node.execute("CLUSTER", "ADDSLOTS", *slots)
            # Numbers that are given beforehand spare the nodes an election.
            node.execute("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.execute("CLUSTER", "MEET", HOST, masters[0].port)
        masters[0].wait(lambda: all(map(self._is_complete, self.nodes)), "meet the others")
        for master, replica in zip(masters, replicas, strict=False):
            replica.execute("CLUSTER", "REPLICATE", _identity(master))
        masters[0].wait(lambda: all(replica.follows() for replica in replicas), "be copied")
        masters[0].wait(lambda: all(map(self._sees_replicas, self.nodes if replicas else ())), "be followed")

    def _is_complete(self, node: RedisServer) -> bool:
        facts = node.facts("CLUSTER", "INFO")
        return facts["cluster_state"] == "ok" and int(facts["cluster_known_nodes"]) == len(self.nodes)

    def _sees_replicas(self, node: RedisServer) -> bool:
        return all(node.execute("CLUSTER", "REPLICAS", _identity(master)) for master in self.nodes[:_MASTERS])

    def _a_running_node(self) -> RedisServer:
        return next(node for node in self.nodes if node.running)

    def _node_at(self, port: int | None) -> RedisServer:
        return next(node for node in self.nodes if node.port == port)

    def _replica_of(self, master: RedisServer) -> RedisServer:
        for line in self._a_running_node().execute("CLUSTER", "REPLICAS", _identity(master)):
            return self._node_at(int(line.split()[1].split(b"@")[0].rpartition(b":")[2]))
        raise LookupError("this master has no replica: start the cluster with replicas=True")

    def _wait_until_served_by(self, key: str, node: RedisServer) -> None:
        slot = self.slot_of(key)
        running = [one for one in self.nodes if one.running]
        node.wait(lambda: all(_port_serving(slot, one) == node.port for one in running), "take over")
        node.wait(
            lambda: all(one.facts("CLUSTER", "INFO")["cluster_state"] == "ok" for one in running), "be seen"
        )


def _port_serving(slot: int, seen_by: RedisServer) -> int | None:
    for first, last, (_, port, *_), *_ in seen_by.execute("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return int(port)
    return None


def _identity(node: RedisServer) -> bytes:
    return bytes(node.execute("CLUSTER", "MYID"))


_shared: Callable[[str], RedisCluster] = once(lambda version: RedisCluster.start(version=version))


def shared_redis_cluster(version: str = "newest") -> RedisCluster:
    """This process's cluster of that version, three nodes. Ended at exit; do not stop it or flush it."""
    return _shared(find_redis(version)[0])


class RedisSentinels(Closing):
    """A master, a replica and three Sentinels, which put the replica in the master's place when that is gone.

    Made by `start()`; a context manager that removes all of it in the end.
    """

    def __init__(self) -> None:
        self.servers: list[RedisServer] = []
        """The first master, then the first replica. Failovers do not reorder them."""
        self.sentinels: list[RedisServer] = []

    @classmethod
    def start(cls, *, version: str = "newest") -> Self:
        """Returns when every Sentinel knows the other two and the replica."""
        group = cls()
        master = RedisServer.start(version=version)
        group.servers.append(master)
        group.servers.append(master.replica())
        for _ in range(_SENTINELS):
            group.sentinels.append(_start_sentinel(master))
        master.wait(lambda: all(map(_knows_all, group.sentinels)), "be watched by all")
        return group

    @property
    def url(self) -> str:
        addresses = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{addresses}/{_SERVICE}/0"

    @property
    def master(self) -> RedisServer:
        """As the first Sentinel sees it now."""
        return self._master_of(self.sentinels[0])

    @property
    def replica(self) -> RedisServer:
        return next(server for server in self.servers if server is not self.master)

    def fail_over(self) -> RedisServer:
        """In order. Returns the new master when it takes writes and every Sentinel knows."""
        old, new = self.master, self.replica
        new.catch_up(old)
        self.sentinels[0].execute("SENTINEL", "FAILOVER", _SERVICE)
        return self._wait_for(new)

    def kill_master(self) -> RedisServer:
        """SIGKILL. Returns the new master when it takes writes and every Sentinel knows."""
        old, new = self.master, self.replica
        old.kill()
        return self._wait_for(new)

    def close(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.close()

    def _master_of(self, sentinel: RedisServer) -> RedisServer:
        _, port = sentinel.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def _wait_for(self, new: RedisServer) -> RedisServer:
        new.wait(new.is_master, "become the master")
        new.wait(lambda: all(self._master_of(one) is new for one in self.sentinels), "be known as the master")
        return new


def _start_sentinel(master: RedisServer) -> RedisServer:
    settings = {
        **PRIVATE,
        "sentinel monitor": f"{_SERVICE} {HOST} {master.port} 2",
        "sentinel down-after-milliseconds": f"{_SERVICE} 500",
        "sentinel failover-timeout": f"{_SERVICE} 3000",
    }
    return RedisServer(master.version, master.program, settings, mode=("--sentinel",)).start_on_free_port()


def _knows_all(sentinel: RedisServer) -> bool:
    pairs = sentinel.execute("SENTINEL", "MASTER", _SERVICE)
    facts = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return int(facts[b"num-slaves"]) == 1 and int(facts[b"num-other-sentinels"]) == _SENTINELS - 1
