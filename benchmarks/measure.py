"""How a figure is taken: ours and the raw limit alternate, each several times; every round has a ratio, and their median counts.

Machines are noisy. Within a round the two sides meet the same weather, and the spread of the runs is shown beside every figure
so that a reader can judge it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable

import msgspec


class Series(msgspec.Struct, frozen=True):
    name: str
    unit: str
    runs: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report. `ratio` is ours over the limit's, round by round; `goal` is what the project promised."""

    name: str
    ours: Series
    limit: Series
    goal: float
    higher_is_better: bool = True
    note: str = ""
    facts: dict[str, str] = {}
    """What else was seen, for the reader: nothing is promised of it."""

    @property
    def ratio(self) -> float:
        if len(self.ours.runs) != len(self.limit.runs):
            return self.ours.median / self.limit.median
        return statistics.median(
            mine / limit for mine, limit in zip(self.ours.runs, self.limit.runs, strict=True)
        )

    @property
    def holds(self) -> bool:
        return self.ratio >= self.goal if self.higher_is_better else self.ratio <= self.goal


def alternate(
    rounds: int, ours: tuple[str, Callable[[], float]], limit: tuple[str, Callable[[], float]], unit: str
) -> tuple[Series, Series]:
    sides: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for runs, (_, measure) in zip(sides, (ours, limit), strict=True):
            gc.collect()
            runs.append(measure())
    return Series(ours[0], unit, sides[0]), Series(limit[0], unit, sides[1])
