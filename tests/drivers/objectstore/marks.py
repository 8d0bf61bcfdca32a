"""A state of a compare-and-swap object, of the simplest kind: a list to which each step adds a mark that nobody else has."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import CasObject, Term

NAME = "queues/marks/0/state"


class Marks:
    def __init__(self, body: bytes) -> None:
        self.marks: list[str] = msgspec.msgpack.decode(body, type=list[str]) if body else []
        self.touched = False

    def add(self, mark: str) -> int:
        self.marks.append(mark)
        self.touched = True
        return len(self.marks) - 1

    def serialize(self) -> bytes:
        return msgspec.msgpack.encode(self.marks)


def marks_object(blobs: Blobs, *, term: Term | None = None, give_up_after: float = 30.0) -> CasObject[Marks]:
    return CasObject(blobs, NAME, Marks, term=term, give_up_after=give_up_after)


def add(mark: str) -> Callable[[Marks], int]:
    """A step; its result is the mark's place."""
    return lambda state: state.add(mark)


_runs = itertools.count()


def add_by_run(mark: str) -> Callable[[Marks], tuple[int, str]]:
    """A step whose every run leaves something else, as one that makes lease tokens does: place, and what it left."""

    def step(state: Marks) -> tuple[int, str]:
        left = f"{mark}#{next(_runs)}"
        return state.add(left), left

    return step


def all_marks(state: Marks) -> list[str]:
    return list(state.marks)


class FixedTerm:
    """Of a leader who believes what it is told to believe."""

    def __init__(self, epoch: int, *, valid: bool = True) -> None:
        self._epoch = epoch
        self.valid = valid

    @property
    def epoch(self) -> int:
        return self._epoch

    def is_valid(self) -> bool:
        return self.valid
