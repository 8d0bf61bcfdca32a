"""The kit by way of a broker: every store gets one of its own, in a process beside this one."""

import atexit
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from records import present
from taskharbor.drivers.http import HttpDriver
from taskharbor_testkit.conformance.backend import Backend, Store


class BrokerHost:
    """`broker_host.py`, which serves one store after the other."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("broker_host.py"))]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._stdin, self._stdout = present(self._process.stdin), present(self._process.stdout)
        atexit.register(self.close)

    def close(self) -> None:
        self._stdin.close()
        self._stdout.close()
        self._process.wait(30)

    def ask(self, line: str) -> str:
        """The URL of a broker for the store of this URL; the one before is stopped. `-` only stops that one."""
        self._stdin.write(f"{line}\n")
        self._stdin.flush()
        answer = self._stdout.readline().strip()
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
        url = _host().ask(self._store_url(directory))
        store = Store(HttpDriver.from_url(url), url)
        try:
            await store.refuse_unless_empty()
            yield store
        finally:
            await store.close()
            _host().ask("-")
