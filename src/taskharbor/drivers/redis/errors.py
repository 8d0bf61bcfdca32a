"""TaskHarbor's errors for the errors of Redis, with advice."""

from __future__ import annotations

from redis.exceptions import RedisError

from taskharbor.errors import BackendUnavailable, InvalidRequest, TaskHarborError

REDISCOVER = frozenset({"READONLY", "MASTERDOWN"})
"""Errors of a server that is no longer a master."""

_ADVICE = {
    "READONLY": "the server is a replica: name the master, or let redis+sentinel:// or redis+cluster:// find it",
    "LOADING": "the server is still reading its data from disk",
    "BUSY": "a script of somebody's holds the server; it can be ended with FUNCTION KILL or SCRIPT KILL",
    "MASTERDOWN": "the server is a replica that has lost its master",
    "CLUSTERDOWN": "the cluster is not complete: a master is down and nobody has taken its place yet",
    "MOVED": "the nodes of the cluster do not agree which of them serves this queue",
    "TRYAGAIN": "the slot of this queue is being moved to another node",
    "OOM": "the server's memory is full (maxmemory), and nothing of this call was stored: give it more memory, or keep "
    "finished jobs for less time",
    "MISCONF": "the server cannot write to its disk and therefore takes no changes",
    "NOREPLICAS": "the server has fewer replicas than its min-replicas-to-write asks for",
    "UNKILLABLE": "a script of somebody's holds the server",
    "DENIED": "the server is in protected mode: give it a password, or let it listen to this machine only",
    "EXECABORT": "the server did not begin with the call",
    "max number of clients reached": "the server has no connection left: raise maxclients, or run fewer workers",
    "DB index is out of range": "the server has fewer databases than that: lower the number in the URL",
    "unknown command": "the server is older than 7.0, or the command was renamed or forbidden there",
}
"""Advice by the error's code, or by words in it."""
_WRONG_PASSWORD = "user or password is wrong (special characters are written as %xx)"
_WRONG_URL = {
    "NOAUTH": "the server wants a password: write redis://:password@host or redis://user:password@host",
    "WRONGPASS": _WRONG_PASSWORD,
    "invalid password": _WRONG_PASSWORD,
    "NOPERM": "this user lacks a right: it needs INFO, TIME, and the commands, keys and channels of the queue",
    "without any password configured": "the server has no password, but the URL gives one",
    "cluster support disabled": "the server is not part of a cluster: write redis:// instead of redis+cluster://",
}
"""The same for errors that only another URL avoids."""


def code_of(error: RedisError) -> str:
    """Return the code of an error, its first word. redis-py removes the codes that it knows from the text."""
    return error.status_code or str(error).partition(" ")[0]


def translated(error: RedisError, place: str) -> TaskHarborError:
    """Return the TaskHarbor error for an error of the server."""
    text = " ".join(str(error).split())
    code = code_of(error)
    for advice, kind in ((_WRONG_URL, InvalidRequest), (_ADVICE, BackendUnavailable)):
        found = advice.get(code) or next((words for said, words in advice.items() if said in text), None)
        if found is not None:
            # The server's own words may quote the user's name, or a command with its values.
            return kind(f"{place}: {found}" if kind is InvalidRequest else f"{place}: {found} ({code})")
    return TaskHarborError(f"{place}: {text[:300]}")
