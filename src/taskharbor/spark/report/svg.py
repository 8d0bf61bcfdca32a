"""SVG by hand: a drawing collects shapes. Looks come from the style sheet, by class; text is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from taskharbor.spark.report.wording import escaped

Point: TypeAlias = tuple[float, float]
Anchor: TypeAlias = Literal["start", "middle", "end"]


def number(value: float) -> str:
    """A tenth of a pixel is as fine as anybody sees."""
    text = f"{value:.1f}"
    return text.removesuffix(".0")


class Drawing:
    def __init__(self, width: float, height: float, description: str) -> None:
        self.width = width
        self.height = height
        self._description = description
        self._shapes: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str) -> None:
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self._shapes.append(f'<line class="{look}" {ends}/>')

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        look: str,
        *,
        hint: str | None = None,
        opacity: float | None = None,
        rounding: float = 0,
    ) -> None:
        place = f'x="{number(x)}" y="{number(y)}" width="{number(max(0.0, width))}" height="{number(max(0.0, height))}"'
        if opacity is not None:
            place += f' fill-opacity="{opacity:.2f}"'
        if rounding:
            place += f' rx="{number(rounding)}"'
        if hint is None:
            self._shapes.append(f'<rect class="{look}" {place}/>')
        else:
            self._shapes.append(f'<rect class="{look}" {place}><title>{escaped(hint)}</title></rect>')

    def circle(self, x: float, y: float, radius: float, look: str) -> None:
        self._shapes.append(
            f'<circle class="{look}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"/>'
        )

    def text(self, x: float, y: float, words: str, look: str, anchor: Anchor = "start") -> None:
        at = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._shapes.append(
            f'<text class="{look}" x="{number(x)}" y="{number(y)}"{at}>{escaped(words)}</text>'
        )

    def polyline(self, points: Sequence[Point], look: str) -> None:
        """A lone point is drawn as a dot: a line of one would not be seen."""
        if len(points) == 1:
            self.circle(*points[0], 1.5, f"{look} dot")
        elif points:
            self._shapes.append(f'<path class="{look}" d="{_path(points)}"/>')

    def area(self, upper: Sequence[Point], lower: Sequence[Point], look: str) -> None:
        if upper:
            outline = _path([*upper, *reversed(lower)])
            self._shapes.append(f'<path class="{look}" d="{outline}Z"/>')

    def as_html(self, look: str = "") -> str:
        size = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        label = f'role="img" aria-label="{escaped(self._description)}"'
        return f'<svg class="{look}" {size} {label}>{"".join(self._shapes)}</svg>'


def steps(points: Sequence[Point], last_x: float) -> list[Point]:
    """The corners of a step plot: each value holds until the next one begins, the last until `last_x`."""
    corners: list[Point] = []
    for index, (x, y) in enumerate(points):
        corners += [(x, y), (points[index + 1][0] if index + 1 < len(points) else last_x, y)]
    return corners


def text_width(words: str, size: float = 12) -> float:
    """Roughly, for a proportional system font: good enough to keep labels apart."""
    narrow = sum(character in "iljtf.,:;' |!()" for character in words)
    return size * (0.64 * (len(words) - narrow) + 0.36 * narrow)


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
