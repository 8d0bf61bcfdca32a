"""One leased job in a worker's hands, from reserve to settled."""

from __future__ import annotations

import asyncio
from typing import Any

from taskharbor.drivers.contract import Settlement
from taskharbor.jobs import JobRecord
from taskharbor.middleware import Job


class Hold:
    """Shared by the backend's thread and the handlers' thread; each field has one writer.

    The backend's thread owns token, expiry, `reported`, `lost` and `settling`; the handlers' thread owns `progress`,
    `job`, `task`, `waited` and `settlement`.
    """

    __slots__ = (
        "expires_at_us",
        "job",
        "lost",
        "progress",
        "record",
        "reported",
        "settlement",
        "settling",
        "task",
        "token",
        "waited",
    )

    def __init__(self, record: JobRecord) -> None:
        assert record.token is not None
        assert record.expires_at_us is not None
        self.record = record
        self.token = record.token
        self.expires_at_us = record.expires_at_us
        self.progress: bytes | None = None
        self.reported: bytes | None = None
        """The progress the backend has already."""
        self.lost = False
        """The lease is gone: whatever the handler does, nothing is written for it."""
        self.settling = False
        self.waited = False
        """Whether the handler gave up its turn at least once."""
        self.job: Job | None = None
        self.task: asyncio.Task[Any] | None = None
        self.settlement: Settlement | None = None
        """How the execution ended, once it has."""

    def report(self, _: JobRecord, progress: bytes) -> None:
        """What the handler says of how far it is; the next heartbeat takes it along."""
        self.progress = progress
