"""The attempt log by its cursor `epoch.xid.seq`: where it ends, how far a number of rows goes, how a range is cut up.

The rules are those of `drivers.postgres.log`: rows are taken by the number of the transaction that wrote them, and only below the
oldest one that still runs, so a row that commits late is never stepped over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from taskharbor.bulk.cursors import HistoryGone
from taskharbor.bulk.tables import Part
from taskharbor.drivers.postgres.bulk.planner import Planner
from taskharbor.drivers.postgres.log import START, Place, parse_cursor
from taskharbor.errors import InvalidRequest

_LOOKS = 20
_PAUSE = 0.005
"""A row that is held back is usually held back by a transaction that ends in a moment."""
_ROWS_PER_PART = 20_000
_PROBES_PER_PART = 16
_NO_END = 2**63 - 1


class Log:
    def __init__(self, planner: Planner, place: str) -> None:
        self._planner = planner
        self._place = place

    def start(self) -> str:
        return str(START)

    def latest(self) -> str:
        """The last row that is certain, after a short wait for those that can be seen already."""
        epoch, xid, seq, newest = self._planner.row("end_of_log")
        if newest is not None and (xid is None or int(newest) > int(xid)):
            for _ in range(_LOOKS):
                if self._planner.row("is_over", {"xid": newest})[0]:
                    break
                time.sleep(_PAUSE)
            epoch, xid, seq, _ = self._planner.row("end_of_log")
        return str(Place(epoch, 0, 0) if xid is None else Place(epoch, int(xid), seq))

    def limited(self, after: str, until: str, rows: int | None) -> str:
        first, last = parse_cursor(after), parse_cursor(until)
        if (last.epoch, last.xid, last.seq) <= (first.epoch, first.xid, first.seq):
            return after
        if rows is None:
            return until
        for low, high, begin, end in self._ranges(first, last):
            values = {**_bounds(low, high, begin, end), "skipped": rows - 1}
            found = self._planner.rows("limited", values)
            if found:
                return str(Place(low.epoch, int(found[0][0]), found[0][1]))
            if high is not last and self._planner.rows("limited", {**values, "skipped": 0}):
                # An old epoch whose rest is fewer rows than asked for: the next one begins with the next batch.
                return str(Place(low.epoch + 1, 0, 0))
        return until

    def between(self, after: str, until: str, parallelism: int) -> list[Part]:
        first, last = parse_cursor(after), parse_cursor(until)
        parts = []
        for number, (low, high, begin, end) in enumerate(self._ranges(first, last)):
            following = self._following(low, begin, end, is_resumed=number == 0 and first.seq > 0)
            if following is None:
                continue
            edges = self._edges(following, high, begin, parallelism) if high is last else []
            for left, right in zip([low, *edges], [*edges, high], strict=True):
                parts.append(Part(table="attempts", bounds=_bounds(left, right, begin, end)))
        return parts

    def _ranges(self, after: Place, until: Place) -> Iterator[tuple[Place, Place, int, int]]:
        """Per epoch: after which place, up to which, and which numbers belong to it."""
        epochs: dict[int, int] = dict(self._planner.rows("epochs"))
        if max(after.epoch, until.epoch) > max(epochs):
            raise InvalidRequest(
                f"{self._place}: {after} and {until} are cursors of another store: this one is in epoch {max(epochs)}. "
                "Begin with a fresh checkpoint"
            )
        for epoch in range(after.epoch, until.epoch + 1):
            low = after if epoch == after.epoch else Place(epoch, 0, 0)
            high = until if epoch == until.epoch else Place(epoch, 2**64 - 1, _NO_END)
            if (low.xid, low.seq) < (high.xid, high.seq):
                yield low, high, epochs[epoch], epochs.get(epoch + 1, _NO_END)

    def _following(self, place: Place, begin: int, end: int, *, is_resumed: bool) -> Place | None:
        """The first row of a range. Raises HistoryGone where retention has overtaken a reader that comes back.

        A sign of that is a cursor whose own row is gone while numbers after it were given out and the next row has not the next
        number. (Where queues are kept for different times, a reader far behind misses rows of those kept shortest, and there
        is no sign of it.)
        """
        values = {"xid": str(place.xid), "seq": place.seq, "begin": begin, "end": end}
        is_there, xid, seq, last_number, has_begun = self._planner.row("around", values)
        if is_resumed and end == _NO_END and not has_begun:
            raise InvalidRequest(
                f"{self._place}: the cursor {place} is of a transaction that has not begun here yet: the store was put back to "
                "an earlier time, or it is another one. Begin with a fresh checkpoint"
            )
        if is_resumed and not is_there and last_number > place.seq and seq != place.seq + 1:
            raise HistoryGone(
                f"{self._place}: rows of the attempt log after {place} were removed by retention before this reader came to "
                "them. Keep the log longer (keep_attempts of the queues), or begin with a fresh checkpoint"
            )
        return None if xid is None else Place(place.epoch, int(xid), seq)

    def _edges(self, first: Place, last: Place, begin: int, parallelism: int) -> list[Place]:
        """Where to cut a range of the present epoch into about equal shares.

        Numbers are given out densely and roughly in the order of commits, so a few looks at which numbers stand where tell how
        the rows are spread over the transactions, which by themselves say nothing about it.
        """
        count = min(parallelism, (last.seq - first.seq) // _ROWS_PER_PART)
        span = last.xid - first.xid
        if count < 2 or span < count:
            return []
        probes = min(_PROBES_PER_PART * count, span)
        xids = sorted({first.xid + span * n // probes for n in range(1, probes)})
        answers = self._planner.rows("probes", {"xids": list(map(str, xids)), "begin": begin})
        edges: list[Place] = []
        for xid, (_, seq) in zip(xids, answers, strict=True):
            wanted = first.seq + (last.seq - first.seq) * (len(edges) + 1) // count
            if seq is not None and seq >= wanted and len(edges) < count - 1:
                edges.append(Place(last.epoch, xid, 0))
        return edges


def _bounds(low: Place, high: Place, begin: int, end: int) -> dict[str, str | int | None]:
    return {
        "after_xid": str(low.xid),
        "after_seq": low.seq,
        "until_xid": str(high.xid),
        "until_seq": high.seq,
        "begin": begin,
        "end": end,
    }
