"""Geometry of the charts: shapes that the templates write as SVG. Colours come from the style sheet, by class.

Each chart takes its width, because a phone gets a drawing of its own. A chart that is wide enough has bands over its buckets
that say their numbers when the pointer is over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from taskharbor.jobs import SECOND, Micros
from taskharbor.spark.report import formatting
from taskharbor.spark.report.data import Buckets, RunTimes
from taskharbor.spark.report.formatting import DAY, HOUR, MINUTE, UNITS, clock, duration, moment, short_count

WIDE, HALF, NARROW = 1000, 474, 350
# A chart of this width has room beside its plot, and a reader with a pointer.
ROOMY = 460

Point: TypeAlias = tuple[float, float]
# Tag, attributes, text and hint of an SVG element.
Shape: TypeAlias = tuple[str, dict[str, str], str, str]


# -- marks of axes: round numbers and whole units of time, few of them ----------------------------------------------

TIME_STEPS = (
    *(SECOND * n // 10 for n in (1, 2, 5)),
    *(unit * n for unit in (SECOND, MINUTE) for n in (1, 2, 5, 10, 15, 30)),
    *(HOUR * n for n in (1, 2, 3, 6, 12)),
    *(DAY * n for n in (1, 2, 7, 14, 28, 56, 112, 364)),
)
LOG_MARKS = (
    *(10**n for n in range(6)),
    *(unit * n for unit in (SECOND, MINUTE, HOUR) for n in (1, 10)),
    *(DAY * n for n in (4, 40, 400)),
)
LOG_NAMES = {MINUTE: "1 min", HOUR: "1 h"}


class Tick(NamedTuple):
    """A mark at a value of an axis."""

    at: float
    label: str


def count_ticks(top: float, most: int = 4, *, whole: bool = True) -> list[Tick]:
    """From 0 to the first round number at or above `top`."""
    step = max(_round_step(max(top, 1e-9) / most), 1.0 if whole else 0.0)
    last = math.ceil(max(top, step) / step - 1e-9)
    return [Tick(n * step, short_count(n * step)) for n in range(last + 1)]


def duration_ticks(top: float, most: int = 4) -> list[Tick]:
    """From 0 to the first mark at or above `top` microseconds, in whole units of time."""
    wanted = max(top, 1.0) / most
    step = _round_step(wanted) if wanted < SECOND else float(_time_step(wanted))
    last = math.ceil(max(top, 1.0) / step - 1e-9)
    unit, name = next((unit, name) for unit, name in UNITS if last * step >= unit)
    return [Tick(n * step, f"{short_count(n * step / unit)} {name}" if n else "0") for n in range(last + 1)]


def log_ticks(low: float, high: float) -> list[Tick]:
    """Powers of ten below a minute and usual lengths of time above; one mark at or outside each end."""
    below = [mark for mark in LOG_MARKS if mark <= low][-1:]
    inside = [mark for mark in LOG_MARKS if low < mark < high]
    above = [mark for mark in LOG_MARKS if mark >= high][:1]
    return [Tick(float(mark), LOG_NAMES.get(mark) or duration(mark)) for mark in (*below, *inside, *above)]


def time_ticks(start: Micros, end: Micros, most: int) -> list[Tick]:
    """Return ticks at whole steps of the clock. Midnight shows the day instead of the time."""
    step = _time_step(max(1, end - start) / most)
    ticks = []
    for at in range(-(-start // step) * step, end + 1, step):
        is_day = at % DAY == 0 and step >= MINUTE
        ticks.append(Tick(at, f"{moment(at).day} {moment(at):%b}" if is_day else clock(at, step)))
    return ticks


def _time_step(wanted: float) -> Micros:
    step = next((one for one in TIME_STEPS if one >= wanted), TIME_STEPS[-1])
    return step * math.ceil(wanted / step)


def _round_step(wanted: float) -> float:
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))


# -- a drawing ------------------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """Values per bucket. `look` is a class of the style sheet, `label` is the text in the legend or at the right."""

    look: str
    name: str
    values: Sequence[float | None]
    label: str = ""
    limit: int | None = None


class Margins(NamedTuple):
    """Room around a plot. The left one is for the labels of the values, the bottom one for those of the time."""

    left: float = 46
    top: float = 22
    right: float = 8
    bottom: float = 24


MARGINS = Margins()


class Chart:
    """A drawing of one plot, which is `tall` pixels high without its margins."""

    def __init__(self, width: float, tall: float, buckets: Buckets, margins: Margins = MARGINS) -> None:
        self.width, self.height = width, margins.top + tall + margins.bottom
        self.top, self.bottom = margins.top, margins.top + tall
        self.left, self.right = margins.left, width - margins.right
        self.shapes: list[Shape] = []
        self._buckets = buckets
        self._highest = 1.0

    def add(self, tag: str, look: str, text: str = "", hint: str = "", /, **attributes: float | str) -> None:
        """Add a shape. Numbers are rounded to a tenth of a pixel."""
        written = {
            name.replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
            for name, value in attributes.items()
        }
        self.shapes.append((tag, {"class": look} | written, text, hint))

    def text(self, x: float, y: float, words: str, look: str, anchor: str = "start") -> None:
        """Add text at a point."""
        self.add("text", look, words, x=x, y=y, text_anchor=anchor)

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str) -> None:
        """Add a straight line."""
        self.add("line", look, x1=x1, y1=y1, x2=x2, y2=y2)

    def path(self, points: Iterable[Point], look: str, end: str = "") -> None:
        """Add a line through the points."""
        self.add("path", look, d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + end)

    def area(self, upper: Sequence[Point], lower: Sequence[Point], look: str) -> None:
        """Add the area between two lines."""
        self.path([*upper, *reversed(lower)], look, "Z")

    def x(self, index: float) -> float:
        """Left edge of a bucket."""
        return self.left + index / max(1, self._buckets.number) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Height of a value."""
        return self.bottom - value / self._highest * (self.bottom - self.top)

    def value_axis(self, ticks: Sequence[Tick], unit: str = "", highest: float = 0) -> None:
        """Grid lines with labels. The top of the scale is the highest tick, or `highest` if that is more."""
        self._highest = max(1e-9, ticks[-1].at, highest)
        for tick in ticks:
            y = self.y(tick.at)
            self.line(self.left, y, self.right, y, "grid" if tick.at else "base")
            self.text(self.left - 8, y + 4, tick.label, "tick", "end")
        if unit:
            self.text(self.left, self.top - 7, unit, "unit")

    def time_axis(self) -> None:
        """Labels of the time, unless the chart has no room below its plot."""
        if self.height > self.bottom:
            start, step, _ = self._buckets
            ticks = time_ticks(start, self._buckets.end_us, max(2, int((self.right - self.left) / 60)))
            self.labels(ticks, [self.x((tick.at - start) / step) for tick in ticks])

    def labels(self, ticks: Sequence[Tick], places: Sequence[float]) -> None:
        """Labels below the plot. One that would touch the label before it or the edge is left out."""
        free = self.left - MARGINS.left
        for tick, x in zip(ticks, places, strict=True):
            half = text_width(tick.label) / 2
            if x - half >= free and x + half <= self.width + 8:
                self.line(x, self.bottom, x, self.bottom + 4, "base")
                self.text(x, self.bottom + 18, tick.label, "tick", "middle")
                free = x + half + 8

    def finished(self, series: Sequence[Series], words: Callable[[float], str], unit: str = "") -> Chart:
        """Add the time axis, and last the bands: they must lie above all else to catch the pointer.

        A phone has no pointer, and the bands are most of the page's size.
        """
        self.time_axis()
        size = {"width": self.x(1) - self.x(0), "height": self.bottom - self.top}
        for index in range(self._buckets.number if self.width >= ROOMY else 0):
            said = [f"{words(value)} {one.name}" for one in series if (value := one.values[index])]
            if said:
                hint = "\n".join((self._buckets.moment(index) + unit, *said))
                self.add("rect", "hit", "", hint, x=self.x(index), y=self.top, **size)
        return self


# -- charts over time ---------------------------------------------------------------------------------------------


def line_chart(width: float, tall: float, buckets: Buckets, series: Sequence[Series], *, unit: str) -> Chart:
    """Rates over time. The area below the last line is shaded."""
    chart = Chart(width, tall, buckets)
    chart.value_axis(count_ticks(_highest(series), whole=False), unit)
    for one in series:
        _lines(chart, one, is_shaded=one is series[-1])
    return chart.finished(series, short_count, f" ({unit})")


def percentile_chart(width: float, tall: float, buckets: Buckets, series: Sequence[Series]) -> Chart:
    """Durations over time, for series in rising order. In a wide chart each line ends in its name and last value."""
    lasts = [[value for value in one.values if value is not None][-1] for one in series]
    ends = [f"{one.name} {duration(last)}" for one, last in zip(series, lasts, strict=True)]
    right = max(map(text_width, ends)) + 14 if width >= ROOMY else MARGINS.right
    chart = Chart(width, tall, buckets, Margins(left=58, top=12, right=right))
    chart.value_axis(duration_ticks(_highest(series)))
    y = chart.bottom + 15
    for number, (one, last, end) in enumerate(zip(series, lasts, ends, strict=True), start=1):
        _lines(chart, one)
        if width >= ROOMY:
            # Labels do not cover each other, and leave room for those of the series above.
            y = max(min(chart.y(last), y - 15), chart.top + 15 * (len(series) - number))
            chart.text(chart.right + 8, y + 4, end, f"{one.look} endlabel")
    return chart.finished(series, duration)


def area_chart(width: float, tall: float, buckets: Buckets, series: Sequence[Series], *, unit: str) -> Chart:
    """Stacked areas: the outline is the sum. First and last values extend to the edges of the plot."""
    chart = Chart(width, tall, buckets)
    chart.value_axis(count_ticks(max(_sums(series))), unit)
    places = [chart.left, *(chart.x(index + 0.5) for index in range(buckets.number)), chart.right]
    lower = [(x, chart.bottom) for x in places]
    for number, one in enumerate(series, start=1):
        sums = _sums(series[:number])
        upper = [(x, chart.y(value)) for x, value in zip(places, [sums[0], *sums, sums[-1]], strict=True)]
        chart.area(upper, lower, f"{one.look} fill")
        chart.path(upper, f"{one.look} line thin")
        lower = upper
    return chart.finished(series, short_count)


def bar_chart(width: float, tall: float, buckets: Buckets, series: Sequence[Series], *, unit: str) -> Chart:
    """Stacked bars, for rare events."""
    chart = Chart(width, tall, buckets)
    chart.value_axis(count_ticks(max(_sums(series)), most=3), unit)
    full = chart.x(1) - chart.x(0)
    thick = min(26.0, max(1.0, full - min(2.0, full / 4)))
    for index in range(buckets.number):
        low, left = 0.0, chart.x(index + 0.5) - thick / 2
        for one in series:
            if value := one.values[index]:
                y = chart.y(low + value)
                chart.add("rect", f"{one.look} fill", x=left, y=y, width=thick, height=chart.y(low) - y)
                low += value
    return chart.finished(series, short_count)


def step_chart(width: float, buckets: Buckets, series: Series, *, is_last: bool) -> Chart:
    """A low chart below its name and its label. Only the last one of a column has a time axis."""
    chart = Chart(width, 58, buckets, Margins(top=34, bottom=MARGINS.bottom if is_last else 0))
    values = [value or 0 for value in series.values]
    highest = max([*values, series.limit or 0])
    top = count_ticks(highest, most=2, whole=False)[-1]
    if series.limit is not None and highest <= 2.5 * series.limit:
        top = Tick(series.limit, short_count(series.limit))
    chart.value_axis([Tick(0, "0"), top], highest=highest)
    chart.text(chart.left, chart.top - 10, series.name, "stripname")
    chart.text(chart.right, chart.top - 10, series.label, series.look, "end")
    corners = [(chart.x(index + side), chart.y(y)) for index, y in enumerate(values) for side in (0, 1)]
    chart.area(corners, [(chart.left, chart.bottom), (chart.right, chart.bottom)], "done shade")
    chart.path(corners, "done line")
    if series.limit is not None:
        chart.line(chart.left, chart.y(series.limit), chart.right, chart.y(series.limit), "limit")
    return chart.finished([series._replace(name="running")], _rate)


# -- charts with a row per name -----------------------------------------------------------------------------------


def heat_chart(width: float, buckets: Buckets, series: Sequence[Series], *, unit: str) -> Chart:
    """A row of cells per name on one scale: the darker, the more."""
    highest = max(value or 0 for one in series for value in one.values) or 1.0
    title = f"{short_count(highest)} {unit}"
    chart, middles = _row_chart(width, buckets, [(one.name, one.label) for one in series], 20, title)
    start = width - text_width(title) - 8 - 6 * 16
    chart.text(start - 6, 13, "0", "tick", "end")
    for n in range(6):
        place = {"x": start + n * 16, "y": 3, "width": 16, "height": 12}
        chart.add("rect", "done cell", fill_opacity=f"{0.1 + 0.9 * n / 5:.2f}", **place)
    for one, middle in zip(series, middles, strict=True):
        size = {"y": middle - 9, "height": 17}
        chart.add("rect", "cellback", x=chart.left, width=chart.right - chart.left, **size)
        for index, value in enumerate(one.values):
            if value:
                hint = f"{one.name}, {buckets.moment(index)}: {_rate(value)}"
                opacity = f"{0.1 + 0.9 * value / highest:.2f}"
                place = {"x": chart.x(index), "width": chart.x(1) - chart.x(0), **size}
                chart.add("rect", "done cell", "", hint, fill_opacity=opacity, **place)
    chart.time_axis()
    return chart


def range_chart(width: float, times: Sequence[RunTimes]) -> Chart:
    """A dot at the median, a bar to the 95th and a thin line to the 99th percentile, on a logarithmic scale."""
    spans = [(one.run_p50_us, one.run_p95_us, one.run_p99_us) for one in times]
    rows = [(one.type, " · ".join(map(duration, span))) for one, span in zip(times, spans, strict=True)]
    chart, middles = _row_chart(width, Buckets(0, 1, 1), rows, 28, "p50 · p95 · p99")
    ticks = log_ticks(min(span[0] for span in spans), max(span[2] for span in spans))
    first, last = (math.log(max(tick.at, 1e-9)) for tick in (ticks[0], ticks[-1]))

    def x(value: float) -> float:
        return chart.x((math.log(max(value, 1e-9)) - first) / ((last - first) or 1.0))

    chart.labels(ticks, [x(tick.at) for tick in ticks])
    for tick in ticks:
        chart.line(x(tick.at), chart.top, x(tick.at), chart.bottom, "grid")
    for one, span, (_, note), y in zip(times, spans, rows, middles, strict=True):
        p50, p95, p99 = map(x, span)
        chart.line(p50, y, p99, y, "done line")
        chart.add("rect", "p95 fill", x=p50, y=y - 4, width=max(2, p95 - p50), height=8, rx=2)
        chart.line(p99, y - 4, p99, y + 4, "done line")
        chart.add("circle", "p50 fill ringed", cx=p50, cy=y, r=5)
        if width >= ROOMY:
            hint = f"{one.type}: {formatting.plural(one.executions, 'execution')}\np50 · p95 · p99: {note}"
            chart.add("rect", "hit", "", hint, x=0, y=y - 14, width=width, height=28)
    return chart


def _row_chart(
    width: float, buckets: Buckets, rows: Sequence[tuple[str, str]], tall: float, title: str
) -> tuple[Chart, list[float]]:
    """A chart with names and notes beside its rows, or above them on a phone, and the middles of the rows."""
    roomy = width >= ROOMY
    notes = max(text_width(note) for _, note in rows) + 20
    names = min(max(text_width(name, 13) for name, _ in rows) + 14, width * 0.4)
    margins = Margins(left=names, top=26, right=notes) if roomy else Margins(left=14, top=22, right=14)
    pitch = tall if roomy else tall + 16
    chart = Chart(width, pitch * len(rows), buckets, margins)
    chart.text(width, 13, title, "tick", "end")
    for number, (name, note) in enumerate(rows):
        x, y, anchor = (names - 14, tall / 2 + 4, "end") if roomy else (0, 12, "start")
        y += chart.top + pitch * number
        chart.text(x, y, _fitting(name, x if roomy else width - notes), "rowname", anchor)
        chart.text(width, y, note, "tick", "end")
    return chart, [chart.top + pitch * (number + 1) - tall / 2 for number in range(len(rows))]


# -- parts of charts ----------------------------------------------------------------------------------------------


def text_width(words: str, size: float = 12) -> float:
    """Rough width in a proportional system font: good enough to keep labels apart."""
    narrow = sum(character in "iljtf.,:;' |!()" for character in words)
    return size * (0.64 * (len(words) - narrow) + 0.36 * narrow)


def _fitting(words: str, room: float) -> str:
    while text_width(words, 13) > room and len(words) > 4:
        words = formatting.shortened(words, len(words) - 1)
    return words


def _lines(chart: Chart, series: Series, *, is_shaded: bool = False) -> None:
    """Lines through the middles of the buckets, with gaps. A point alone is a dot, because its line is invisible."""
    for is_gap, values in groupby(enumerate(series.values), lambda pair: pair[1] is None):
        if is_gap:
            continue
        run = [(chart.x(index + 0.5), chart.y(value or 0)) for index, value in values]
        if is_shaded:
            chart.area(run, [(run[0][0], chart.bottom), (run[-1][0], chart.bottom)], f"{series.look} shade")
        if len(run) == 1:
            chart.add("circle", f"{series.look} line dot", cx=run[0][0], cy=run[0][1], r=1.5)
        else:
            chart.path(run, f"{series.look} line")


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 10 else short_count(value)


def _highest(series: Sequence[Series]) -> float:
    return max((value for one in series for value in one.values if value is not None), default=0.0)


def _sums(series: Sequence[Series]) -> list[float]:
    return [sum(filter(None, values)) for values in zip(*(one.values for one in series), strict=True)]
