"""What a run, a compaction or a vacuum did."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called as each step begins: its name, its number from 0, and how many there are."""


class RunSummary(msgspec.Struct, kw_only=True):
    source: str
    run: int
    rows_read: int
    tables: dict[str, int]
    """Rows written, by table."""
    seconds: float
    steps: dict[str, float]
    """Seconds, by step."""
    startup_seconds: float = 0.0
    """What starting Spark took, apart from `seconds`."""


class CompactSummary(msgspec.Struct, kw_only=True):
    tables: dict[str, int]
    """Dates that were written anew, by table."""
    files_before: int
    files_after: int
    seconds: float


class VacuumSummary(msgspec.Struct, kw_only=True):
    directories: int
    bytes: int
    manifests: int
    dates: int
    """Dates that were dropped because they are older than asked for, over all tables."""
