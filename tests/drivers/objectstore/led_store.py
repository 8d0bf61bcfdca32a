"""As much of a driver as leadership needs: a catalog, and a cell of marks per queue."""

from __future__ import annotations

from marks import Marks, MarksCodec

from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import Cell, Term
from taskharbor.drivers.objectstore.catalog import Catalog, state_name


class LedStore:
    def __init__(self, blobs: Blobs) -> None:
        self.catalog = Catalog(blobs)
        self._blobs = blobs
        self._term: Term | None = None
        self._cells: dict[str, Cell[Marks]] = {}

    def lead(self, term: Term | None) -> None:
        self._term = term
        self.catalog.lead(term)
        for cell in self._cells.values():
            cell.lead(term)

    def compare_soon(self) -> None:
        for cell in self._cells.values():
            cell.must_compare()

    async def cell(self, queue: str) -> Cell[Marks]:
        await self.catalog.add_queues([queue])
        if queue not in self._cells:
            self._cells[queue] = Cell(self._blobs, state_name(queue, 0), MarksCodec(), term=self._term)
        return self._cells[queue]
