"""Calls as the bytes that go out, and the replies as the answers that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import hiredis

from taskharbor.drivers.redis.options import Options
from taskharbor.drivers.redis.scripts import Script
from taskharbor.errors import BackendUnavailable

Word: TypeAlias = bytes | str | int
# The library's own annotation says a tuple of one.
pack = cast("Callable[[tuple[Word, ...]], bytes]", hiredis.pack_command)

_MULTI = pack(("MULTI",))
_EXEC = pack(("EXEC",))
WAIT_REPLIES = 2


class Call(NamedTuple):
    """One script, run once."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Word]


def pack_call(call: Call, *, in_full: bool = False) -> bytes:
    """`in_full`: with the script's text, for a server that does not know it. It does afterwards."""
    script, keys, args = call
    if in_full:
        return pack(("EVAL", script.source, len(keys), *keys, *args))
    return pack(("EVALSHA", script.sha, len(keys), *keys, *args))


def pack_transaction(calls: Sequence[Call], *, in_full: bool) -> tuple[bytes, int]:
    """All of them or none, and how many replies come before the one that holds the answers.

    In a transaction a script that the server does not know fails alone, and the others take effect. Where all are the same
    script, all fail; where they differ, none may be unknown.
    """
    scripts = {call.script for call in calls}
    loads = [pack(("SCRIPT", "LOAD", one.source)) for one in scripts] if in_full or len(scripts) > 1 else []
    return b"".join((_MULTI, *loads, *map(pack_call, calls), _EXEC)), 1 + len(loads) + len(calls)


def pack_wait(options: Options, calls: Sequence[Call]) -> bytes:
    """The commands that wait until replicas have what the calls change; empty where nobody asks for that. `WAIT_REPLIES` come.

    A server waits for what this connection has written. A repeated call may find everything done, by another connection; so
    something is written here in any case, which is gone at once.
    """
    if not (options.wait_replicas or options.wait_aof is not None):
        return b""
    if not any(call.script.writes for call in calls):
        return b""
    limit = max(1, round(options.wait_timeout * 1000))
    mark = pack(("SET", f"{calls[0].keys[0]}:waited", "", "PX", 1))
    if options.wait_aof is not None:
        return mark + pack(("WAITAOF", 1, options.wait_aof, limit))
    return mark + pack(("WAIT", options.wait_replicas, limit))


def has_waited(options: Options, replies: Sequence[Any]) -> bool:
    """Whether as many as asked for have it, by the last of the replies."""
    answer = replies[-1]
    if options.wait_aof is not None:
        return isinstance(answer, list) and answer[0] >= 1 and answer[1] >= options.wait_aof
    return isinstance(answer, int) and answer >= options.wait_replicas


def not_kept(options: Options) -> BackendUnavailable:
    what = "in their append-only files" if options.wait_aof is not None else "in memory"
    wanted = options.wait_aof if options.wait_aof is not None else options.wait_replicas
    return BackendUnavailable(
        f"{options.place}: the change was made, but {wanted} replicas did not have it {what} within "
        f"{options.wait_timeout:g} s: a failover now could lose it; repeating the call is safe"
    )
