"""Reserves whose answer was lost: the next one for the same worker asks for their jobs first, by their names."""

from __future__ import annotations

_MOST = 8
"""Per queue and worker. A broker remembers an answer for a minute; who loses more than that has other troubles."""


class Claims:
    """One handle's."""

    def __init__(self) -> None:
        self._lost: dict[tuple[str, str], list[str]] = {}

    def name(self, queue: str, worker: str) -> str | None:
        """Under which to ask; None: under a new one."""
        lost = self._lost.get((queue, worker))
        if not lost:
            return None
        name = lost.pop()
        if not lost:
            del self._lost[queue, worker]
        return name

    def lose_answer(self, queue: str, worker: str, name: str) -> None:
        lost = self._lost.setdefault((queue, worker), [])
        lost.append(name)
        del lost[:-_MOST]
