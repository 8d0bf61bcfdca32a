"""What all plots over time share: where the values go, the axes, the legend, and bands that say their numbers when touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from taskharbor.jobs import Micros
from taskharbor.spark.report.svg import Drawing, Point, text_width
from taskharbor.spark.report.ticks import Tick, time_ticks

LEGEND_LINE = 22
AXIS_HEIGHT = 24
ROOMY = 460
"""A drawing at least this wide has room beside its plot, and a reader with a pointer."""
GUTTER = 46
"""Room at the left for the labels of the values."""


class TimeAxis(NamedTuple):
    start_us: Micros
    step_us: Micros
    steps: int

    @property
    def end_us(self) -> Micros:
        return self.start_us + self.step_us * self.steps

    def at(self, index: int) -> Micros:
        return self.start_us + self.step_us * index


class LegendEntry(NamedTuple):
    look: str
    name: str


class Frame:
    """The rectangle that values are drawn in."""

    def __init__(
        self,
        drawing: Drawing,
        axis: TimeAxis,
        *,
        top: float,
        bottom: float,
        left: float = GUTTER,
        right: float = 8,
    ) -> None:
        self.drawing = drawing
        self.axis = axis
        self.top = top
        self.bottom = bottom
        self.left = left
        self.right = drawing.width - right
        self._highest = 1.0

    # -- where things go -----------------------------------------------------------------------------------------

    def x(self, at: float) -> float:
        span = max(1, self.axis.end_us - self.axis.start_us)
        return self.left + (at - self.axis.start_us) / span * (self.right - self.left)

    def x_of(self, index: float) -> float:
        """The left edge of a bucket."""
        return self.left + index / max(1, self.axis.steps) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - value / self._highest * (self.bottom - self.top)

    def middles(self, values: Sequence[float | None]) -> list[list[Point]]:
        """Points in the middle of their buckets, in runs without a gap."""
        runs: list[list[Point]] = [[]]
        for index, value in enumerate(values):
            if value is None:
                runs.append([])
            else:
                runs[-1].append((self.x_of(index + 0.5), self.y(value)))
        return [run for run in runs if run]

    # -- axes ----------------------------------------------------------------------------------------------------

    def value_axis(self, ticks: Sequence[Tick], *, unit: str = "", highest: float = 0) -> None:
        """Hairlines with their labels; the highest tick becomes the top of the scale, unless something is higher."""
        self._highest = max(1e-9, ticks[-1].at, highest)
        for tick in ticks:
            y = self.y(tick.at)
            self.drawing.line(self.left, y, self.right, y, "base" if tick.at == 0 else "grid")
            self.drawing.text(self.left - 8, y + 4, tick.label, "tick", "end")
        if unit:
            self.drawing.text(self.left, self.top - 7, unit, "unit")

    def time_axis(self) -> None:
        """Labels that would touch the next one or the edge are left out."""
        most = max(2, int((self.right - self.left) / 60))
        free_from = self.left - GUTTER
        for tick in time_ticks(self.axis.start_us, self.axis.end_us, most):
            x = self.x(tick.at)
            half = text_width(tick.label) / 2
            if x - half >= free_from and x + half <= self.drawing.width:
                self.drawing.line(x, self.bottom, x, self.bottom + 4, "base")
                self.drawing.text(x, self.bottom + 18, tick.label, "tick", "middle")
                free_from = x + half + 8

    def hints(self, words: Callable[[int], str | None]) -> None:
        """Bands over each bucket, above everything else. Last, so that they catch the pointer."""
        if self.drawing.width < ROOMY:
            return  # A phone has no pointer, and the bands are most of the page's size.
        for index in range(self.axis.steps):
            hint = words(index)
            if hint is not None:
                left = self.x_of(index)
                self.drawing.rect(
                    left,
                    self.top,
                    self.x_of(index + 1) - left,
                    self.bottom - self.top,
                    "hit",
                    hint=hint,
                )


def legend_lines(entries: Sequence[LegendEntry], width: float) -> list[list[LegendEntry]]:
    """Entries in lines that fit."""
    lines: list[list[LegendEntry]] = [[]]
    used = 0.0
    for entry in entries:
        needed = text_width(entry.name) + 32
        if lines[-1] and used + needed > width:
            lines.append([])
            used = 0.0
        lines[-1].append(entry)
        used += needed
    return lines


def draw_legend(
    drawing: Drawing, lines: Sequence[Sequence[LegendEntry]], *, left: float = 0, top: float = 0
) -> float:
    """Says how much height it took."""
    for number, line in enumerate(lines):
        x = left
        y = top + 12 + number * LEGEND_LINE
        for entry in line:
            drawing.rect(x, y - 9, 10, 10, f"{entry.look} swatch", rounding=2)
            drawing.text(x + 16, y, entry.name, "legend")
            x += text_width(entry.name) + 32
    return LEGEND_LINE * len(lines)
