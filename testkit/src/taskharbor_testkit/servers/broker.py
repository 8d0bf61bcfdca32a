"""`taskharbor broker` as a process of its own, for tests that kill it or look at what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PATIENCE = 30.0


class BrokerProcess:
    """`taskharbor broker`, as a user would start it. `lines` are what it has said until it was ready."""

    def __init__(self, process: subprocess.Popen[str], url: str, lines: list[str]) -> None:
        self.process = process
        self.url = url
        self.lines = lines

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def stop(self) -> int:
        """Gracefully; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextmanager
def broker_process(
    store_url: str, *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[BrokerProcess]:
    """A broker process on a free port, unless the arguments name one. Gone when the block ends, however it ends."""
    bind: Sequence[str] = () if "--bind" in arguments else ("--bind", "127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, "-m", "taskharbor", "broker", "--store", store_url, *bind, *arguments],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    assert process.stderr is not None
    reading: threading.Thread | None = None
    try:
        lines: list[str] = []
        url = ""
        for line in process.stderr:
            lines.append(line)
            found = re.search(r"serving .* at (https?://\S+)", line)
            if found:
                url = found[1]
                break
        if not url:
            raise RuntimeError(f"the broker did not start (exit code {process.wait()}):\n{''.join(lines)}")
        # A pipe that nobody reads would stop the broker in the middle of a line.
        reading = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reading.start()
        yield BrokerProcess(process, url, lines)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        if reading is not None:
            reading.join(PATIENCE)
        process.stderr.close()
