"""Everything in one hand: what the pytest fixtures give to a test."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Unpack

from taskharbor.clock import FakeClock
from taskharbor.harbor import Harbor, JobType
from taskharbor.jobs import JobRecord
from taskharbor.testing.assertions import Expected, assert_enqueued, enqueued, refute_enqueued
from taskharbor.testing.draining import DrainReport, clock_of, drain, drain_async
from taskharbor.testing.inlining import inline


class HarborTesting:
    """An app on a private store, with this package's functions as methods."""

    def __init__(self, harbor: Harbor) -> None:
        self.harbor = harbor

    @property
    def clock(self) -> FakeClock:
        """The clock that stands still."""
        return clock_of(self.harbor)

    def advance(self, by: timedelta | float) -> None:
        """Let time pass, by a timedelta or by seconds."""
        self.clock.advance(by)

    def drain(
        self, queues: Sequence[str] | None = None, *, with_scheduled: bool = False, limit: int = 10_000
    ) -> DrainReport:
        """See `taskharbor.testing.drain`."""
        return drain(self.harbor, queues, with_scheduled=with_scheduled, limit=limit)

    async def drain_async(
        self, queues: Sequence[str] | None = None, *, with_scheduled: bool = False, limit: int = 10_000
    ) -> DrainReport:
        """See `taskharbor.testing.drain_async`."""
        return await drain_async(self.harbor, queues, with_scheduled=with_scheduled, limit=limit)

    def inline(self, *, raise_errors: bool = True) -> AbstractContextManager[Harbor]:
        """See `taskharbor.testing.inline`."""
        return inline(self.harbor, raise_errors=raise_errors)

    def enqueued(
        self, job: JobType[..., Any] | str | None = None, **expected: Unpack[Expected]
    ) -> list[JobRecord]:
        """See `taskharbor.testing.enqueued`."""
        return enqueued(self.harbor, job, **expected)

    def assert_enqueued(
        self,
        job: JobType[..., Any] | str | None = None,
        *,
        count: int | None = None,
        **expected: Unpack[Expected],
    ) -> list[JobRecord]:
        """See `taskharbor.testing.assert_enqueued`."""
        return assert_enqueued(self.harbor, job, count=count, **expected)

    def refute_enqueued(
        self, job: JobType[..., Any] | str | None = None, **expected: Unpack[Expected]
    ) -> None:
        """See `taskharbor.testing.refute_enqueued`."""
        refute_enqueued(self.harbor, job, **expected)
