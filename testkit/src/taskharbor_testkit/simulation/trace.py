"""What a run did, line by line: two runs of one seed must agree in every byte of it."""

from __future__ import annotations

import hashlib


class Trace:
    def __init__(self) -> None:
        self._events: list[tuple[float, str, str]] = []

    def __len__(self) -> int:
        return len(self._events)

    def add(self, at: float, who: str, what: str) -> None:
        self._events.append((at, who, what))

    def lines(self) -> list[str]:
        return [f"{at:12.6f} {who:<8} {what}" for at, who, what in self._events]

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()
