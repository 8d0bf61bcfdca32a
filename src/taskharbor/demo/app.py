"""The demo's app: small jobs of the kinds real apps have. `ms` is how long the pretended work takes."""

from __future__ import annotations

import asyncio

from taskharbor.harbor import Harbor
from taskharbor.middleware import current_job
from taskharbor.signals import Unrecoverable

API_QUEUE = "api"
API_LIMIT = 4
"""Never more calls of the pretended API at once, over all workers."""

harbor = Harbor("memory://")  # The demo's workers get their store by --url.


@harbor.job
async def send_mail(ms: int) -> str:
    """Quick and asynchronous: many run at once on one event loop."""
    await asyncio.sleep(ms / 1000)
    return "sent"


@harbor.job
def resize_image(ms: int) -> int:
    """A plain function: runs on a thread, and looks now and then whether it should stop."""
    current_job().wait_for_stop(ms / 1000)
    return ms


@harbor.job(max_attempts=8, backoff=(0.05, 0.4))
async def fetch_page(ms: int, failures: int) -> str:
    """Fails a few times first, and is tried again after a short pause."""
    await asyncio.sleep(ms / 1000)
    attempt = current_job().attempt
    if attempt <= failures:
        raise ConnectionError(f"the server hung up (try {attempt})")
    return "fetched"


@harbor.job(max_attempts=2, backoff=(0.05, 0.1))
async def charge_card(hopeless: bool) -> None:
    """Never succeeds: half give up at once, half after their tries are used up. Both end as dead letters."""
    if hopeless:
        raise Unrecoverable("the card was stolen")
    raise ValueError("the amount makes no sense")


@harbor.job(max_attempts=8, backoff=(0.05, 0.1))
async def sync_account(ms: int, fails_once: bool = False) -> None:
    """Keyed by account: never two of one account at once, and what piles up meanwhile becomes one job."""
    await asyncio.sleep(ms / 1000)
    if fails_once and current_job().attempt == 1:
        raise TimeoutError("the account was locked")


@harbor.job
async def remind(ms: int) -> None:
    """Enqueued for later."""
    await asyncio.sleep(ms / 1000)


@harbor.job(priority=10)
async def reset_password(ms: int) -> None:
    """Somebody is waiting: overtakes the others."""
    await asyncio.sleep(ms / 1000)


@harbor.job(queue=API_QUEUE)
async def call_api(ms: int) -> str:
    """In a queue that allows only a few at once, however many workers there are."""
    await asyncio.sleep(ms / 1000)
    return "called"
