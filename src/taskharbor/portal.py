"""A door from synchronous code to the asynchronous core: one background event loop per process.

Every synchronous client shares it, so `Client.enqueue` costs a hand-over to a running loop and never a new
loop or connection per call.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Portal:
    def __init__(self) -> None:
        self._ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="taskharbor-portal", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._ready.set)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a synchronous call from inside the portal's own loop would wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the caller must not leave the work running behind its back.
            raise


_portal: Portal | None = None
_owner = 0
_lock = threading.Lock()


def portal() -> Portal:
    """This process's portal; a forked child makes its own, because threads do not survive a fork."""
    global _portal, _owner
    with _lock:
        if _portal is None or _owner != os.getpid():
            _portal = Portal()
            _owner = os.getpid()
        return _portal
