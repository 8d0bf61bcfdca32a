"""Asynchronous work of a store on the process's background loop, for stores whose driver knows no other kind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from taskharbor.portal import portal

T = TypeVar("T")


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """From any thread, also below a running event loop."""
    return portal().call(work)


def begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Without waiting: the server works while the caller does."""
    return asyncio.run_coroutine_threadsafe(work, portal().loop)
