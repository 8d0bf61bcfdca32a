"""The three containers the store is built of, all flat in cost whatever they hold.

A queue's order is almost the order in which things arrive, so a plain heap would pay for sorting what is already
sorted. A `Line` appends what comes in order and heaps only the strays; a `PlaceLine` forgets what left it lazily;
a `Ledger` numbers what it is given and finds it again by number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")

Item: TypeAlias = tuple[Any, ...]

_TIDY_FROM = 512
"""Fewer stale items than this are not worth a pass over the line."""


class Line:
    """Items in ascending order. Adding and taking is O(1) for what arrives in order, O(log n) for the rest."""

    __slots__ = ("run", "strays")

    def __init__(self) -> None:
        self.run: deque[Item] = deque()
        self.strays: list[Item] = []

    def __len__(self) -> int:
        return len(self.run) + len(self.strays)

    def push(self, item: Item) -> None:
        run = self.run
        if not run or run[-1] < item:
            run.append(item)
        else:
            heappush(self.strays, item)

    def push_sorted(self, items: list[Item]) -> None:
        if not self.run or self.run[-1] < items[0]:
            self.run.extend(items)
        else:
            for item in items:
                self.push(item)

    def head(self) -> Item | None:
        run, strays = self.run, self.strays
        if strays and (not run or strays[0] < run[0]):
            return strays[0]
        return run[0] if run else None

    def pop(self) -> Item:
        """The head; the line must not be empty."""
        run, strays = self.run, self.strays
        if strays and (not run or strays[0] < run[0]):
            return heappop(strays)
        return run.popleft()


class PlaceLine(Line):
    """A line of items that end in a slot. An item counts as long as it is its slot's `place`; any other is stale.

    Whoever takes a slot out of the middle only changes its `place` and adds one to `stale`.
    """

    __slots__ = ("stale",)

    def __init__(self) -> None:
        super().__init__()
        self.stale = 0

    def head(self) -> Item | None:
        item = Line.head(self)
        while item is not None and item[-1].place is not item:
            self.pop()
            self.stale -= 1
            item = Line.head(self)
        return item

    def take(self) -> Item | None:
        """The head, removed."""
        run, strays = self.run, self.strays
        while run or strays:
            item = heappop(strays) if strays and (not run or strays[0] < run[0]) else run.popleft()
            is_stale = item[-1].place is not item
            if not is_stale:
                return item
            self.stale -= 1
        return None

    @property
    def live(self) -> int:
        """How many items count: what makes counters that cannot drift."""
        return len(self.run) + len(self.strays) - self.stale

    def __iter__(self) -> Iterator[Item]:
        """What counts, oldest additions first within each part. The line must not change meanwhile."""
        for part in (self.run, self.strays):
            for item in part:
                if item[-1].place is item:
                    yield item

    def tidy(self) -> None:
        """Drop the stale once they outnumber the rest: amortised O(1) for each."""
        if self.stale < _TIDY_FROM or self.stale * 2 < len(self):
            return
        self.run = deque(item for item in self.run if item[-1].place is item)
        self.strays = [item for item in self.strays if item[-1].place is item]
        heapify(self.strays)
        self.stale = 0


class Ledger(Generic[T]):
    """Things by the number they got on arrival: 1, 2, 3, ... A removed one leaves a hole until all before it went too."""

    __slots__ = ("_entries", "_first", "_holes")

    def __init__(self) -> None:
        self._entries: list[T | None] = []
        self._first = 1
        self._holes = 0
        """How many entries at the front are holes."""

    def append(self, entry: T) -> int:
        entries = self._entries
        entries.append(entry)
        return self._first + len(entries) - 1

    def remove(self, number: int) -> None:
        entries = self._entries
        entries[number - self._first] = None
        while self._holes < len(entries) and entries[self._holes] is None:
            self._holes += 1
        if self._holes >= _TIDY_FROM and self._holes * 2 > len(entries):
            del entries[: self._holes]
            self._first += self._holes
            self._holes = 0

    def after(self, number: int) -> Iterator[T]:
        """Upwards from the first one behind `number`."""
        for index in range(max(number + 1 - self._first, self._holes), len(self._entries)):
            entry = self._entries[index]
            if entry is not None:
                yield entry

    def before(self, number: int | None = None) -> Iterator[T]:
        """Downwards from the last one before `number`, or from the very last."""
        top = len(self._entries) if number is None else min(number - self._first, len(self._entries))
        for index in range(top - 1, self._holes - 1, -1):
            entry = self._entries[index]
            if entry is not None:
                yield entry
