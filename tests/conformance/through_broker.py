"""The kit by way of a broker: every store gets one of its own, in a process beside this one."""

import atexit
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from taskharbor.drivers.http import HttpDriver
from taskharbor_testkit.conformance.backend import Backend, Store


class BrokerHost:
    """`broker_host.py`, which serves one store after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("broker_host.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def serve(self, store_url: str) -> str:
        """A broker for this store; the one before is stopped."""
        return self._ask(store_url)

    def rest(self) -> None:
        """Nobody needs the store any more."""
        self._ask("-")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, f"the broker host ended with code {self._process.poll()}"
        assert not answer.startswith("failed"), answer
        return answer


@cache
def _host() -> BrokerHost:
    return BrokerHost()


class ThroughBroker(Backend):
    """`store_url` names the store behind the broker, by a fresh directory."""

    def __init__(self, store_url: Callable[[Path], str]) -> None:
        super().__init__(store_url)
        self._store_url = store_url

    @asynccontextmanager
    async def store(self, directory: Path) -> AsyncIterator[Store]:
        url = _host().serve(self._store_url(directory))
        store = Store(HttpDriver.from_url(url), url)
        try:
            await store.refuse_unless_empty()
            yield store
        finally:
            await store.close()
            _host().rest()
