"""Jobs that differ in nothing but their payloads: by the million, a record for each would cost more than storing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import overload

from taskharbor.ids import new_ids
from taskharbor.jobs import JobRecord


class AlikeJobs(Sequence[JobRecord]):
    """A sequence of records like any other. But who knows it takes the template and the payloads, and no record is ever made.

    Records get their ids when they are made: on the first look at one of them, and for all at once.
    """

    __slots__ = ("_records", "payloads", "template")

    def __init__(self, template: JobRecord, payloads: Sequence[bytes]) -> None:
        self.template = template
        """Has neither an id nor a payload of its own."""
        self.payloads = payloads
        self._records: list[JobRecord] | None = None

    def __len__(self) -> int:
        return len(self.payloads)

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(self.records())

    @overload
    def __getitem__(self, place: int) -> JobRecord: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[JobRecord]: ...

    def __getitem__(self, place: int | slice) -> JobRecord | Sequence[JobRecord]:
        if isinstance(place, slice) and self._records is None:
            return AlikeJobs(self.template, self.payloads[place])
        return self.records()[place]

    def records(self) -> list[JobRecord]:
        """The same ones whenever asked: what is changed in them stays changed."""
        if self._records is None:
            template = self.template
            made = [copy(template) for _ in self.payloads]
            for record, job_id, payload in zip(made, new_ids(len(made)), self.payloads, strict=True):
                record.id = job_id
                record.payload = payload
            self._records = made
        return self._records
