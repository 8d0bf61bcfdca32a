"""Placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taskharbor.context import Job
from taskharbor.handlers import Handler
from taskharbor.worker.threads import ThreadPool


class ProcessPool:
    def __init__(self, handlers: Mapping[str, Handler], *, size: int, threads: ThreadPool) -> None: ...

    async def run(self, job: Job) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...
