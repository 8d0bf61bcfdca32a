"""What a race needs of the backend that it is run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from benchmarks.peers.contender import Contender

Ask = Callable[[Contender, int], int]
"""How many of so many jobs are not yet acknowledged."""


class Track(Protocol):
    @property
    def contenders(self) -> Sequence[Contender]: ...

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What the backend itself raises."""

    def admit(self, contender: Contender) -> None:
        """Raises CannotInstall where the server is too old for it."""

    def fresh(self) -> AbstractContextManager[str]:
        """The URL of an empty store."""

    def settle_down(self) -> None:
        """Nobody pays for what was written before."""

    def asking(self, url: str) -> AbstractContextManager[Ask]: ...
