"""Plots over time. Each takes its width, so that a phone gets a drawing of its own and not a shrunken one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from taskharbor.spark.report.frame import (
    AXIS_HEIGHT,
    GUTTER,
    ROOMY,
    Frame,
    LegendEntry,
    TimeAxis,
    draw_legend,
    legend_lines,
)
from taskharbor.spark.report.svg import Drawing, Point, steps, text_width
from taskharbor.spark.report.ticks import Tick, count_ticks, duration_ticks
from taskharbor.spark.report.wording import duration, short_count, time_of

UNIT_LINE = 22
"""Room above a frame for the name of its unit."""


class Line(NamedTuple):
    look: str
    """A class of the style sheet: its colour."""
    name: str
    values: Sequence[float | None]
    legend: str = ""
    """What the legend says instead of the name alone."""
    filled: bool = False

    @property
    def entry(self) -> LegendEntry:
        return LegendEntry(self.look, self.legend or self.name)


def lines_plot(
    width: float, height: float, axis: TimeAxis, lines: Sequence[Line], *, unit: str, description: str
) -> Drawing:
    """Counts or rates over time, named in a legend."""
    legend = legend_lines([line.entry for line in lines], width - GUTTER)
    drawing = Drawing(width, height, description)
    top = draw_legend(drawing, legend, left=GUTTER) + UNIT_LINE
    frame = Frame(drawing, axis, top=top, bottom=height - AXIS_HEIGHT)
    frame.value_axis(count_ticks(_highest(lines), whole=False), unit=unit)
    for line in lines:
        for run in frame.middles(line.values):
            if line.filled:
                frame.drawing.area(
                    run, [(run[0][0], frame.bottom), (run[-1][0], frame.bottom)], f"{line.look} shade"
                )
            frame.drawing.polyline(run, f"{line.look} line")
    frame.time_axis()
    frame.hints(lambda index: _hint(axis, lines, index, short_count, unit))
    return drawing


def percentiles_plot(
    width: float, height: float, axis: TimeAxis, lines: Sequence[Line], *, description: str
) -> Drawing:
    """Durations over time; where there is room each line carries its name and its last value at its end."""
    roomy = width >= ROOMY
    drawing = Drawing(width, height, description)
    top = 12.0 if roomy else draw_legend(drawing, legend_lines([line.entry for line in lines], width)) + 8
    ends = [f"{line.name} {duration(_last(line.values))}" for line in lines]
    right = max((text_width(words) for words in ends), default=0) + 14 if roomy else 8
    frame = Frame(drawing, axis, top=top, bottom=height - AXIS_HEIGHT, left=GUTTER + 12, right=right)
    frame.value_axis(duration_ticks(_highest(lines)))
    labels: list[tuple[float, str, str]] = []
    for line, words in zip(lines, ends, strict=True):
        runs = frame.middles(line.values)
        for run in runs:
            drawing.polyline(run, f"{line.look} line")
        if runs:
            labels.append((runs[-1][-1][1], words, line.look))
    if roomy:
        heights = _apart([y for y, _, _ in labels], 15, frame.top, frame.bottom)
        for (_, words, look), y in zip(labels, heights, strict=True):
            drawing.text(frame.right + 8, y + 4, words, f"{look} endlabel")
    frame.time_axis()
    frame.hints(lambda index: _hint(axis, lines, index, duration, ""))
    return drawing


def stacked_areas(
    width: float, height: float, axis: TimeAxis, lines: Sequence[Line], *, unit: str, description: str
) -> Drawing:
    """One on top of the other: the outline is the sum."""
    legend = legend_lines([line.entry for line in lines], width - GUTTER)
    drawing = Drawing(width, height, description)
    top = draw_legend(drawing, legend, left=GUTTER) + UNIT_LINE
    frame = Frame(drawing, axis, top=top, bottom=height - AXIS_HEIGHT)
    frame.value_axis(count_ticks(max(_sums(lines, axis.steps), default=0)), unit=unit)
    below = [0.0] * axis.steps
    for line in lines:
        above = [low + (value or 0) for low, value in zip(below, line.values, strict=True)]
        upper = _outline(frame, above)
        drawing.area(upper, _outline(frame, below), f"{line.look} fill")
        drawing.polyline(upper, f"{line.look} line thin")
        below = above
    frame.time_axis()
    frame.hints(lambda index: _hint(axis, lines, index, short_count, ""))
    return drawing


def stacked_bars(
    width: float, height: float, axis: TimeAxis, lines: Sequence[Line], *, unit: str, description: str
) -> Drawing:
    """For rare things: a bar where something happened, nothing where not."""
    legend = legend_lines([line.entry for line in lines], width - GUTTER)
    drawing = Drawing(width, height, description)
    top = draw_legend(drawing, legend, left=GUTTER) + UNIT_LINE
    frame = Frame(drawing, axis, top=top, bottom=height - AXIS_HEIGHT)
    ticks = count_ticks(max(_sums(lines, axis.steps), default=0), most=3)
    frame.value_axis(ticks, unit=unit)
    full = frame.x_of(1) - frame.x_of(0)
    thick = min(26.0, max(1.0, full - min(2.0, full / 4)))
    for index in range(axis.steps):
        low = 0.0
        left = frame.x_of(index + 0.5) - thick / 2
        for line in lines:
            value = line.values[index] or 0
            if value:
                tall = frame.y(low) - frame.y(low + value)
                drawing.rect(left, frame.y(low + value), thick, tall, f"{line.look} fill")
                low += value
    frame.time_axis()
    frame.hints(lambda index: _hint(axis, lines, index, short_count, ""))
    return drawing


class Strip(NamedTuple):
    name: str
    values: Sequence[float | None]
    limit: int | None = None
    note: str = ""
    is_alarming: bool = False


def step_strips(width: float, axis: TimeAxis, strips: Sequence[Strip], *, description: str) -> Drawing:
    """A small step plot per row, each with a scale of its own, against its limit where it has one."""
    tall, gap = 58.0, 34.0
    drawing = Drawing(width, len(strips) * (tall + gap) + AXIS_HEIGHT, description)
    frame: Frame | None = None
    for number, strip in enumerate(strips):
        top = number * (tall + gap) + gap - 6
        frame = Frame(drawing, axis, top=top, bottom=top + tall)
        highest = max([value or 0 for value in strip.values] + [strip.limit or 0, 0])
        frame.value_axis(_strip_ticks(highest, strip.limit), highest=highest)
        drawing.text(frame.left, top - 10, strip.name, "stripname")
        drawing.text(frame.right, top - 10, strip.note, "alarmnote" if strip.is_alarming else "tick", "end")
        points = [(frame.x_of(index), frame.y(value or 0)) for index, value in enumerate(strip.values)]
        outline = steps(points, frame.right)
        drawing.area(outline, [(frame.left, frame.bottom), (frame.right, frame.bottom)], "done shade")
        drawing.polyline(outline, "done line")
        if strip.limit is not None:
            y = frame.y(strip.limit)
            drawing.line(frame.left, y, frame.right, y, "limit")
        frame.hints(_running(axis, strip))
    if frame is not None:
        frame.time_axis()
    return drawing


def _strip_ticks(highest: float, limit: int | None) -> list[Tick]:
    """Zero and one more: the limit, unless the values leave it far below."""
    if limit is not None and highest <= 2.5 * limit:
        return [Tick(0, "0"), Tick(limit, short_count(limit))]
    return [Tick(0, "0"), count_ticks(highest, most=2, whole=False)[-1]]


def _running(axis: TimeAxis, strip: Strip) -> Callable[[int], str | None]:
    line = Line("done", "running", strip.values)
    return lambda index: _hint(axis, [line], index, _rate, "")


def heat_strips(
    width: float, axis: TimeAxis, strips: Sequence[Strip], *, legend: str, description: str
) -> Drawing:
    """A row of cells per name; the darker, the more. One scale for all rows."""
    roomy = width >= ROOMY
    names = max((text_width(strip.name, 13) for strip in strips), default=0)
    notes = max((text_width(strip.note) for strip in strips), default=0) if roomy else 0.0
    left = min(names + 12, width * 0.42) if roomy else 0.0
    tall = 20.0 if roomy else 36.0
    head = 30.0
    drawing = Drawing(width, head + len(strips) * tall + 4 + AXIS_HEIGHT, description)
    highest = max([value or 0 for strip in strips for value in strip.values] + [0]) or 1.0
    _heat_legend(drawing, legend, highest, width)
    frame = Frame(
        drawing,
        axis,
        top=head,
        bottom=head + len(strips) * tall + 4,
        left=left,
        right=notes + 12 if roomy else 0,
    )
    for number, strip in enumerate(strips):
        top = head + number * tall
        name = _fitting(strip.name, left - 12 if roomy else width)
        if roomy:
            drawing.text(left - 12, top + 14, name, "rowname", "end")
            drawing.text(width, top + 14, strip.note, "tick", "end")
        else:
            drawing.text(0, top + 12, name, "rowname")
            top += 17
        drawing.rect(frame.left, top + 1, frame.right - frame.left, 17, "cellback")
        for index, value in enumerate(strip.values):
            if value:
                x = frame.x_of(index)
                hint = f"{strip.name}, {_moment(axis, index)}: {_rate(value)}"
                wide = frame.x_of(index + 1) - x
                drawing.rect(
                    x, top + 1, wide, 17, "done cell", hint=hint, opacity=0.1 + 0.9 * value / highest
                )
    frame.time_axis()
    return drawing


def _heat_legend(drawing: Drawing, words: str, highest: float, width: float) -> None:
    cells, size = 6, 16
    end = f"{short_count(highest)} {words}"
    left = width - text_width(end) - 8 - cells * size
    drawing.text(left - 6, 13, "0", "tick", "end")
    for number in range(cells):
        share = number / (cells - 1)
        drawing.rect(left + number * size, 3, size, 12, "done cell", opacity=0.1 + 0.9 * share)
    drawing.text(width, 13, end, "tick", "end")


def _outline(frame: Frame, values: Sequence[float]) -> list[Point]:
    """From edge to edge: the first and last values hold to the ends of the frame."""
    points = [(frame.x_of(index + 0.5), frame.y(value)) for index, value in enumerate(values)]
    if not points:
        return []
    return [(frame.left, points[0][1]), *points, (frame.right, points[-1][1])]


def _hint(
    axis: TimeAxis, lines: Sequence[Line], index: int, words: Callable[[float], str], unit: str
) -> str | None:
    said = [
        f"{words(value)} {line.name}" for line in lines if (value := line.values[index]) is not None and value
    ]
    if not said:
        return None
    return f"{_moment(axis, index)}{f' ({unit})' if unit else ''}\n" + "\n".join(said)


def _moment(axis: TimeAxis, index: int) -> str:
    return time_of(axis.at(index), axis.step_us, axis.end_us - axis.start_us)


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 10 else short_count(value)


def _fitting(words: str, room: float) -> str:
    while text_width(words, 13) > room and len(words) > 4:
        words = words[:-2] + "\N{HORIZONTAL ELLIPSIS}"
    return words


def _highest(lines: Sequence[Line]) -> float:
    return max((value for line in lines for value in line.values if value is not None), default=0.0)


def _sums(lines: Sequence[Line], buckets: int) -> list[float]:
    return [sum(line.values[index] or 0 for line in lines) for index in range(buckets)]


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _apart(heights: Sequence[float], least: float, top: float, bottom: float) -> list[float]:
    """Move labels up or down until none covers another, changing as little as a single pass can."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = list(heights)
    free_from = top
    for index in order:
        placed[index] = max(placed[index], free_from)
        free_from = placed[index] + least
    room_to = bottom
    for index in reversed(order):
        placed[index] = min(placed[index], room_to)
        room_to = placed[index] - least
    return placed
