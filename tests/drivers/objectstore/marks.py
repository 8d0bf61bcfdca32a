"""A compare-and-swap object of the simplest kind: a list to which each step adds a mark that nobody else has."""

from __future__ import annotations

import asyncio
import functools
import itertools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import msgspec

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import CasObject, Term
from taskharbor.drivers.objectstore.catalog import Catalog, state_name

P = ParamSpec("P")
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


def marks_object(blobs: Blobs, *, name: str = NAME, **options: Any) -> CasObject[Marks]:
    return CasObject(blobs, name, Marks, **options)


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


class FixedTerm(Term):
    """The term of a leader that believes what it is told to believe."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch, 1, lambda: 0)

    def end(self) -> None:
        self.ends_at = 0


class LedStore:
    """The part of a driver that leadership needs: a catalog, and an object of marks per queue."""

    def __init__(self, blobs: Blobs) -> None:
        self.catalog = Catalog(blobs)
        self._blobs = blobs
        self._term: Term | None = None
        self._objects: dict[str, CasObject[Marks]] = {}

    def lead(self, term: Term | None) -> None:
        self._term = term
        self.catalog.object.lead(term)
        for cas in self._objects.values():
            cas.lead(term)

    def compare_soon(self) -> None:
        for cas in self._objects.values():
            cas.must_compare()

    async def object(self, queue: str) -> CasObject[Marks]:
        if queue not in self._objects:
            await self.catalog.add_queues([queue])
            self._objects[queue] = marks_object(self._blobs, name=state_name(queue, 0), term=self._term)
        return self._objects[queue]


# -- time that passes at once -----------------------------------------------------------------------------------------


class _Jumping(selectors.SelectSelector):
    passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody: nothing is due any more")
        self.passed += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which nobody ever waits: where it would sleep, its clock jumps. For code without sockets and threads."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.passed


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a loop with virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
