"""As much of a driver as leadership needs: a catalog, and a compare-and-swap object of marks per queue."""

from __future__ import annotations

from drivers.objectstore.marks import Marks
from taskharbor.drivers.objectstore.blobs import Blobs
from taskharbor.drivers.objectstore.cas import CasObject, Term
from taskharbor.drivers.objectstore.catalog import Catalog, state_name


class LedStore:
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
        await self.catalog.add_queues([queue])
        if queue not in self._objects:
            self._objects[queue] = CasObject(self._blobs, state_name(queue, 0), Marks, term=self._term)
        return self._objects[queue]
