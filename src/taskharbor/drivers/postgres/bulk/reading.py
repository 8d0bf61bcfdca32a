"""Reading a PostgreSQL store: whole tables by ranges of blocks, the attempt log as a stream by ranges of its cursor.

A batch read of `attempts` is one snapshot, however many parts it has and whenever they are read. A read of `jobs` is one where
it is one part; in several parts, a job that ends while they are read may be seen twice, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from taskharbor.bulk.store import BulkStore, DriverStore
from taskharbor.bulk.tables import Part, Selection, Table
from taskharbor.drivers.postgres.bulk import blocks
from taskharbor.drivers.postgres.bulk.cursors import Log
from taskharbor.drivers.postgres.bulk.planner import Planner
from taskharbor.drivers.postgres.bulk.statements import Value, composed, filters, named, values
from taskharbor.drivers.postgres.options import parse_url
from taskharbor.drivers.postgres.statements import quoted


class PostgresReading(BulkStore):
    """The reading half."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._address = parse_url(url)
        self._planner = Planner(self._address)
        self._log = Log(self._planner, self._address.place)

    def close(self) -> None:
        self._planner.close()
        super().close()

    # -- whole tables -------------------------------------------------------------------------------------------

    def parts(self, table: Table, selection: Selection, *, parallelism: int) -> list[Part]:
        if table == "queues":
            return [Part(table=table, selection=selection)]
        if table == "attempts":
            return self._parts_of_attempts(selection, parallelism)
        return self._parts_of_jobs(selection, parallelism)

    def _parts_of_attempts(self, selection: Selection, parallelism: int) -> list[Part]:
        # In this order: whatever the snapshot shows lies in blocks that are there when the sizes are taken.
        snapshot, xmin, begin = self._planner.row("snapshot")
        fixed: dict[str, Value] = {"snapshot": snapshot, "xmin": xmin, "begin": begin}
        days = [
            (name, size)
            for name, size, since, until in self._days("attempts")
            if (since is None or selection.until_us is None or since < selection.until_us)
            and (until is None or selection.since_us is None or until > selection.since_us)
        ]
        shares = blocks.shared_out(days, parallelism) or [[]]
        return [
            Part(table="attempts", selection=selection, bounds={"blocks": blocks.written(share), **fixed})
            for share in shares
        ]

    def _parts_of_jobs(self, selection: Selection, parallelism: int) -> list[Part]:
        (now,) = self._planner.row("time")
        days = [(name, size) for name, size, _, _ in self._days("finished")]
        shares = blocks.shared_out(days, parallelism - 1) if parallelism > 1 else []
        if len(shares) < 2:
            return [Part(table="jobs", selection=selection, bounds={"which": "all", "now": now})]
        return [Part(table="jobs", selection=selection, bounds={"which": "live and dead", "now": now})] + [
            Part(table="jobs", selection=selection, bounds={"blocks": blocks.written(share), "now": now})
            for share in shares
        ]

    def _days(self, parent: str) -> list[tuple[str, int, int | None, int | None]]:
        name = f"{quoted(self._address.schema)}.{parent}"
        return [
            (name, size, since, until)
            for name, size, since, until in self._planner.rows("days", {"parent": name})
        ]

    def read(self, part: Part) -> Iterator[pa.RecordBatch]:
        if part.table == "queues":
            return self._read_queues(part)
        # Imported here: who only plans has no need of it, and it takes a while.
        from taskharbor.drivers.postgres.bulk import arrow

        return arrow.read(self._address, part.table, self._statements(part))

    def _read_queues(self, part: Part) -> Iterator[pa.RecordBatch]:
        with DriverStore(self.url) as store:
            for planned in store.parts("queues", part.selection, parallelism=1):
                yield from store.read(planned)

    def _statements(self, part: Part) -> list[str]:
        given = {**part.bounds, **values(part.selection)}
        if "blocks" in part.bounds:
            name = "attempts_of_blocks" if part.table == "attempts" else "finished_of_blocks"
            return [
                composed(
                    self._text(name, part, share.table),
                    {**given, "from": f"({share.first},0)", "to": f"({share.end},0)"},
                )
                for share in blocks.in_steps(blocks.parsed(str(part.bounds["blocks"])))
            ]
        if part.table == "attempts":
            return [composed(self._text("attempts_of_range", part), given)]
        texts = [self._text("live_jobs", part), self._text("ended_jobs", part, "dead")]
        if part.bounds["which"] == "all":
            texts.append(self._text("ended_jobs", part, "finished"))
        # One statement, one snapshot: a job that moves between the tables is in one of them.
        return [composed(" UNION ALL ".join(texts), given)]

    def _text(self, name: str, part: Part, table: str = "") -> str:
        text = named(name, self._address.schema).replace("/*filters*/", filters(part.table, part.selection))
        return text.replace("/*table*/", quoted(table).replace("%", "%%"))

    # -- the attempt log as a stream ----------------------------------------------------------------------------

    def start(self) -> str:
        return self._log.start()

    def latest(self) -> str:
        return self._log.latest()

    def between(self, after: str, until: str, *, parallelism: int) -> list[Part]:
        return self._log.between(after, until, parallelism)

    def limited(self, after: str, until: str, *, rows: int | None) -> str:
        return self._log.limited(after, until, rows)
