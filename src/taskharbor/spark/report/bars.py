"""Plots without a time axis: ranges of durations, and wholes divided into parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from taskharbor.spark.report.frame import LEGEND_LINE, ROOMY, LegendEntry, draw_legend, legend_lines
from taskharbor.spark.report.svg import Drawing, text_width
from taskharbor.spark.report.ticks import log_ticks
from taskharbor.spark.report.wording import count, duration, percent, plural


class Range(NamedTuple):
    name: str
    note: str
    low: float
    middle: float
    high: float


def ranges_plot(width: float, ranges: Sequence[Range], *, description: str) -> Drawing:
    """A dot at the median, a bar to the 95th and a thin line to the 99th percentile, on a scale of powers of ten."""
    roomy = width >= ROOMY
    tall = 28.0 if roomy else 44.0
    head, foot = 22.0 if roomy else 8.0, 26.0
    drawing = Drawing(width, head + tall * len(ranges) + foot, description)
    ticks = log_ticks(min(one.low for one in ranges), max(one.high for one in ranges))
    first = math.log(max(ticks[0].at, 1e-9))
    length = (math.log(ticks[-1].at) - first) or 1.0
    names = min(max(text_width(one.name, 13) for one in ranges) + 14, width * 0.4)
    left = names if roomy else 14.0
    right = width - (210 if roomy else 14)

    def x(value: float) -> float:
        return left + (math.log(max(value, 1e-9)) - first) / length * (right - left)

    bottom = head + tall * len(ranges)
    free_from = -1.0
    for tick in ticks:
        drawing.line(x(tick.at), head, x(tick.at), bottom, "grid")
        half = text_width(tick.label) / 2
        if x(tick.at) - half > free_from:
            drawing.text(x(tick.at), bottom + 18, tick.label, "tick", "middle")
            free_from = x(tick.at) + half + 6
    if roomy:
        drawing.text(right + 20, head - 8, "p50 \N{MIDDLE DOT} p95 \N{MIDDLE DOT} p99", "tick")
    for number, one in enumerate(ranges):
        middle = head + tall * (number + 0.5)
        if roomy:
            drawing.text(left - 14, middle + 4, one.name, "rowname", "end")
            drawing.text(
                right + 20,
                middle + 4,
                f"{duration(one.low)} \N{MIDDLE DOT} {duration(one.middle)} \N{MIDDLE DOT} {duration(one.high)}",
                "rowvalue",
            )
        else:
            drawing.text(0, middle - 8, one.name, "rowname")
            drawing.text(
                width, middle - 8, f"{duration(one.low)} \N{MIDDLE DOT} {duration(one.high)}", "tick", "end"
            )
            middle += 8
        drawing.line(x(one.low), middle, x(one.high), middle, "done line")
        drawing.rect(x(one.low), middle - 4, max(2.0, x(one.middle) - x(one.low)), 8, "p95 fill", rounding=2)
        drawing.line(x(one.high), middle - 4, x(one.high), middle + 4, "done line")
        drawing.circle(x(one.low), middle, 5, "p50 fill ringed")
        hint = f"{one.name}: {one.note}\np50 {duration(one.low)}\np95 {duration(one.middle)}\np99 {duration(one.high)}"
        if roomy:
            drawing.rect(0, head + tall * number, width, tall, "hit", hint=hint)
    return drawing


class Part(NamedTuple):
    look: str
    name: str
    number: int


def divided_bar(width: float, title: str, parts: Sequence[Part], *, noun: str) -> Drawing:
    """One whole and its parts, each with its number and share. Parts too thin to see are drawn a little wider."""
    whole = sum(part.number for part in parts)
    shown = [part for part in parts if part.number]
    entries = [
        LegendEntry(part.look, f"{part.name} {count(part.number)} ({percent(part.number, whole)})")
        for part in shown
    ]
    lines = legend_lines(entries, width)
    described = f"{title}: {plural(whole, noun)}; " + ", ".join(entry.name for entry in entries)
    drawing = Drawing(width, 58 + LEGEND_LINE * len(lines), described)
    drawing.text(0, 14, title, "stripname")
    drawing.text(width, 14, plural(whole, noun), "tick", "end")
    least = 3.0
    room = width - 2 * max(0, len(shown) - 1)
    sizes = [max(least, room * part.number / max(1, whole)) for part in shown]
    scale = room / (sum(sizes) or 1)
    x = 0.0
    for part, size, entry in zip(shown, sizes, entries, strict=True):
        drawing.rect(x, 26, size * scale, 18, f"{part.look} fill", hint=entry.name, rounding=2)
        x += size * scale + 2
    draw_legend(drawing, lines, top=56)
    return drawing
