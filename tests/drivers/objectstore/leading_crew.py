"""A broker's process, as far as leadership goes: writes marks whenever it believes that it leads, and says what it was told.

    python -m drivers.objectstore.leading_crew URL NAME TERM STOP_AFTER

After STOP_AFTER marks it stops itself (SIGSTOP), between two writes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from drivers.objectstore.led_store import LedStore
from drivers.objectstore.marks import add
from taskharbor.drivers.objectstore.cas import Deposed
from taskharbor.drivers.objectstore.leadership import Leadership
from taskharbor.drivers.objectstore.options import parse_url
from taskharbor.errors import BackendUnavailable


def say(*words: object) -> None:
    print(*words, flush=True)


async def main(url: str, name: str, term: float, stop_after: int) -> None:
    store = LedStore(parse_url(url).open())
    await store.catalog.open()
    leadership = Leadership(store, url=f"http://{name}", term=term)
    running = asyncio.ensure_future(leadership.run())
    written = 0
    while not running.done():
        await leadership.wait_until_leading()
        say("leads", leadership.epoch)
        # Without asking `is_leader`: this one writes on as if it had never heard of terms, and must be stopped all the same.
        while True:
            mark = f"{name}.{written}"
            try:
                cas = await store.object("mail")
                await cas.change(add(mark))
            except Deposed:
                say("refused", mark)
                leadership.look_now()
                await leadership.lost.wait()
                say("lost")
                break
            except BackendUnavailable as error:
                say("unclear", mark, error)
            else:
                say("answered", mark)
            written += 1
            if written == stop_after:
                say("stops")
                os.kill(os.getpid(), signal.SIGSTOP)
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    url, name, term, stop_after = sys.argv[1:]
    asyncio.run(main(url, name, float(term), int(stop_after)))
