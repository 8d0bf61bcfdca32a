"""One server's connection, made when it is needed and again when it was lost. All calls of a handle share it."""

from __future__ import annotations

import asyncio
import os
import ssl
import weakref
from collections.abc import Awaitable, Callable

import hiredis

from taskharbor.drivers.redis.failures import translated
from taskharbor.drivers.redis.options import Address, Options
from taskharbor.drivers.redis.packing import pack
from taskharbor.drivers.redis.wire import ConnectionLost, Wire, dial
from taskharbor.errors import BackendUnavailable

Locate = Callable[[], Awaitable[Address]]


class Node:
    """A server that `locate` finds: always at one address, or wherever the sentinels say."""

    def __init__(self, locate: Locate, options: Options) -> None:
        self._locate = locate
        self._options = options
        self._wire: Wire | None = None
        self._wires: weakref.WeakSet[Wire] = weakref.WeakSet()
        """All that were made here and are still in use, by the listener too."""
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self.address: Address | None = None
        """Where it was found last."""

    @classmethod
    def at(cls, address: Address, options: Options) -> Node:
        async def here() -> Address:
            return address

        node = cls(here, options)
        node.address = address
        return node

    @property
    def wire(self) -> Wire | None:
        """The connection, if it stands."""
        wire = self._wire
        return wire if wire is not None and wire.is_open else None

    async def connect(self) -> Wire:
        """The connection; made now if there is none. Nothing of the caller's was sent when this raises."""
        async with self._connecting:
            if self.wire is None:
                self._wire = await self.another_wire()
            assert self._wire is not None
            return self._wire

    async def another_wire(self) -> Wire:
        """One for the caller alone, ready for commands."""
        self._refuse_if_closed()
        self.address = address = await self._locate()
        wire = await introduced(address, self._options)
        self._wires.add(wire)
        self._refuse_if_closed()
        return wire

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            self.drop("this handle was closed")
            raise BackendUnavailable(f"{self._options.place}: this handle was closed")

    def drop(self, why: str, *, after: Wire | None = None) -> None:
        """Of no use any more: the next call finds the server anew. What ended one connection has probably ended the others.
        `after` a wire failed: unless there is a newer one already."""
        if after is not None and self._wire is not None and self._wire is not after:
            return
        wires = [self._wire, *self._wires]
        self._wire = None
        for wire in wires:
            if wire is not None:
                wire.abort(why)
        self._wires.clear()

    def close(self) -> None:
        self._is_closed = True
        self.drop("this handle was closed")


async def introduced(
    address: Address,
    options: Options,
    *,
    user: str | None = None,
    password: str | None = None,
    db: int | None = None,
) -> Wire:
    """A connection that has said who we are. Account and database are those of the options unless given."""
    user, password = (user, password) if db is not None else (options.user, options.password)
    db = options.db if db is None else db
    place = f"{address}/{db}"
    try:
        wire = await dial(address, options)
    except TimeoutError:
        raise BackendUnavailable(f"{place}: no connection within {options.connect_timeout:g} s") from None
    except OSError as error:
        raise BackendUnavailable(f"{place}: {_words(error)}") from error
    greetings: list[tuple[str, ...]] = [("CLIENT", "SETNAME", "taskharbor")]
    if password is not None:
        greetings.insert(0, ("AUTH", user, password) if user else ("AUTH", password))
    if db:
        greetings.append(("SELECT", str(db)))
    try:
        async with asyncio.timeout(options.connect_timeout):
            answers = await wire.ask(b"".join(map(pack, greetings)), len(greetings))
    except ConnectionLost as error:
        raise BackendUnavailable(f"{place}: {error}") from None
    except TimeoutError:
        wire.abort("it did not greet back")
        raise BackendUnavailable(
            f"{place}: connected, but no answer within {options.connect_timeout:g} s"
        ) from None
    except BaseException:
        wire.abort("given up")
        raise
    for greeting, answer in zip(greetings, answers, strict=True):
        # A server that does not know a name for clients is none the worse for it.
        if isinstance(answer, hiredis.ReplyError) and (
            greeting[0] != "CLIENT" or "max number" in str(answer)
        ):
            wire.abort("not let in")
            raise translated(answer, place)
    return wire


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not trusted ({error.verify_message}): name its authority with tls_ca"
    if isinstance(error, ssl.SSLError):
        return f"no TLS with this server ({error.reason}): is it redis:// instead of rediss://, or the wrong port?"
    if isinstance(error, ConnectionError) and error.errno:
        # The event loop's own words do not say why.
        return os.strerror(error.errno)
    return error.strerror or str(error)
