"""Settlements on the wire: a list per kind, which is written and read in one go. Most batches are of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from taskharbor.drivers.contract import Ack, Discard, Fail, Release, Retry, Settlement
from taskharbor.errors import InvalidRequest


class Settlements(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch of settlements, one list per kind; `order` has a letter for each, in the order of the batch."""

    order: str = ""
    """Empty where all are of one kind."""
    acks: list[Ack] = []
    retries: list[Retry] = []
    fails: list[Fail] = []
    releases: list[Release] = []
    discards: list[Discard] = []

    @classmethod
    def of(cls, batch: Sequence[Settlement]) -> Settlements:
        kinds = set(map(type, batch))
        if kinds == {Ack}:
            return cls(acks=list(batch))  # type: ignore[arg-type]
        told = cls()
        lists = told._lists()
        if not kinds <= _LETTERS.keys():
            raise InvalidRequest("a settlement is an Ack, Retry, Fail, Release or Discard")
        letters = [_LETTERS[type(settlement)] for settlement in batch]
        for letter, settlement in zip(letters, batch, strict=True):
            lists[letter].append(settlement)
        if len(kinds) > 1:
            told.order = "".join(letters)
        return told

    def batch(self) -> list[Settlement]:
        lists = self._lists()
        if not self.order:
            filled = [kind for kind in lists.values() if kind]
            if len(filled) > 1:
                raise InvalidRequest(
                    "settlements of several kinds: say their order, a letter for each (arflx)"
                )
            return filled[0] if filled else []
        iterators = {letter: iter(kind) for letter, kind in lists.items()}
        try:
            ordered = [next(iterators[letter]) for letter in self.order]
        except (KeyError, StopIteration):
            raise InvalidRequest("the order of the settlements does not fit the lists of them") from None
        if len(ordered) != sum(map(len, lists.values())):
            raise InvalidRequest("the order of the settlements does not fit the lists of them")
        return ordered

    def _lists(self) -> dict[str, list[Any]]:
        return {
            "a": self.acks,
            "r": self.retries,
            "f": self.fails,
            "l": self.releases,
            "x": self.discards,
        }


_LETTERS: dict[type, str] = {Ack: "a", Retry: "r", Fail: "f", Release: "l", Discard: "x"}
