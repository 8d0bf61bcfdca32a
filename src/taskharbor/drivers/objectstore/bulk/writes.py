"""The object in which bulk writes are decided: which are being published, and which are.

A write is published by one change of this object, which names all that was staged for it, and then carried out queue by queue.
Whoever comes next finds what was decided and can finish it: the one who tries again, or the next bulk write.
"""

from __future__ import annotations

from typing import Final

import msgspec

from taskharbor.bulk.write_ids import SINGLE, series_of
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cell import Cell
from taskharbor.errors import SchemaMismatch
from taskharbor.jobs import SECOND, Micros

OBJECT: Final = "writes"
FORMAT: Final = 1
KEEP_SINGLE: Final[Micros] = 30 * 86_400 * SECOND
"""Whoever publishes a write of its own again does so soon,"""
KEEP_SERIES: Final[Micros] = 400 * 86_400 * SECOND
"""but a stream may rest for long."""
MOST_SINGLE: Final = 2_000


class Staged(msgspec.Struct, array_like=True, frozen=True):
    """An object with jobs of a task."""

    name: str
    jobs: int


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """What is to be published, in this order."""

    write: str
    begun_at: Micros
    staged: list[Staged]


class Mark(msgspec.Struct, array_like=True, frozen=True):
    """The latest write of a series that is over, and how many jobs it added."""

    number: int
    added: int
    at: Micros


class _Content(msgspec.Struct, array_like=True):
    format: int = FORMAT
    plans: dict[str, Plan] = {}
    """By write."""
    marks: dict[str, Mark] = {}
    """By series."""


class WritesState:
    """As a cell's state."""

    __slots__ = ("content", "touched")

    def __init__(self, content: _Content) -> None:
        self.content = content
        self.touched = False

    def mark_of(self, write: str) -> Mark | None:
        """Where the write is over, or a later one of its series is."""
        series, number = series_of(write)
        mark = self.content.marks.get(series)
        return mark if mark is not None and mark.number >= number else None

    def plan_of(self, write: str) -> Plan | None:
        return self.content.plans.get(write)

    def decide(self, plan: Plan) -> tuple[Mark | None, Plan | None]:
        """How it stands with the write now: somebody else may have been faster."""
        mark = self.mark_of(plan.write)
        if mark is not None:
            return mark, None
        if plan.write not in self.content.plans:
            self.content.plans[plan.write] = plan
            self.touched = True
        return None, self.content.plans[plan.write]

    def close(self, write: str, added: int, now: Micros) -> Mark:
        self.content.plans.pop(write, None)
        mark = self.mark_of(write)
        if mark is None:
            series, number = series_of(write)
            mark = Mark(number, added, now)
            marks = {name: one for name, one in self.content.marks.items() if name != series}
            self.content.marks = _kept({**marks, series: mark}, now)
        self.touched = True
        return mark

    def abandon(self, write: str, now: Micros) -> Plan | None:
        """The plan, where it is too late. A write of a series may be tried again, and then be published."""
        plan = self.plan_of(write)
        if plan is None and series_of(write)[1] == SINGLE:
            self.close(write, 0, now)
        return plan


def _kept(marks: dict[str, Mark], now: Micros) -> dict[str, Mark]:
    """Without what nobody will ask for any more."""
    singles = [name for name, mark in marks.items() if mark.number == SINGLE]
    surplus = set(singles[:-MOST_SINGLE])
    return {
        name: mark
        for name, mark in marks.items()
        if name not in surplus and now - mark.at <= (KEEP_SINGLE if mark.number == SINGLE else KEEP_SERIES)
    }


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Content).decode


class _Codec:
    def empty(self) -> WritesState:
        return WritesState(_Content())

    def decode(self, body: bytes) -> WritesState:
        content = _decode(body)
        if content.format != FORMAT:
            raise SchemaMismatch(
                f"bulk writes were noted in format {content.format}, this version of TaskHarbor reads {FORMAT}: use a newer one"
            )
        return WritesState(content)

    def encode(self, state: WritesState) -> bytes:
        return _encode(state.content)


def writes_cell(blobs: Blobs) -> Cell[WritesState]:
    return Cell(blobs, OBJECT, _Codec())
