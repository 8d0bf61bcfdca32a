"""Output of the commands: JSON documents for programs; tables, texts and progress for people.

Nothing stored in a job can steer the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click
import msgspec

import taskharbor
from taskharbor.cli.options import Invocation
from taskharbor.jobs import SECOND, JobState, Micros
from taskharbor.printable import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Width of the output without a terminal: wide enough that nothing is cut for a script.
PIPED_WIDTH = 200

# Width of a screen from which on tables are shown in full.
WIDE = 90

# The colour of each state, and its name on a narrow terminal.
STATES = {
    JobState.SCHEDULED: ("blue", "sched"),
    JobState.READY: ("cyan", "ready"),
    JobState.BLOCKED: ("magenta", "block"),
    JobState.INFLIGHT: ("yellow", "run"),
    JobState.DONE: ("green", "done"),
    JobState.DEAD: ("red", "dead"),
    JobState.CANCELLED: ("bright_black", "canc"),
}


def emit(document: Any, *, err: bool = False) -> None:
    """One JSON document on one line, of stderr if it is about an error."""
    click.echo(printable_json(document), err=err)


def say(*lines: str, err: bool = False) -> None:
    """Lines of text. No name in one of them begins another."""
    for line in lines:
        click.echo(printable(line), err=err)


def answer(settings: Invocation, document: Any, *lines: str) -> None:
    """The document with --json, the lines otherwise."""
    if settings.json:
        emit(document)
    else:
        say(*lines)


def banner(log_format: str, parts: Iterable[str], advice: str = "") -> None:
    """Two lines for somebody who starts a server on a terminal."""
    if sys.stderr.isatty() and log_format != "json":
        click.secho(
            " · ".join([f"TaskHarbor {taskharbor.__version__}", *map(printable, parts)]), fg="cyan", err=True
        )
        click.secho(f"pid {os.getpid()}; {advice}Ctrl-C stops gracefully", dim=True, err=True)


def console(*, stderr: bool = False) -> Console:
    """A screen that draws nothing of what is stored as markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=wide, highlight=False, markup=False, emoji=False)


def cell(text: str, style: str = "") -> Text:
    """Stored text for one line of a table."""
    from rich.text import Text

    return Text(printable(text.replace("\n", " ")), style=style)


def state_cell(state: JobState) -> Text:
    """A state in its colour."""
    return cell(str(state), STATES[state][0])


class Column(NamedTuple):
    """A column of a table of items.

    Attributes:
        draw: The cell of an item; None: the item's field of the title's name.
        shrinks: Cut if a row is too wide: the widest column first.
        least: The narrowest screen that shows it.
        most: The widest screen that shows it.
    """

    title: str
    draw: Callable[[Any], Text | str] | None = None
    right: bool = False
    shrinks: bool = False
    footer: str = ""
    least: int = 0
    most: int = sys.maxsize


def table(
    screen: Console, columns: Iterable[Column], items: Iterable[Any], *, title: str | None = None
) -> Table:
    """Columns with no lines but one under the header: reads well, copies well, fits narrow terminals."""
    from rich import box
    from rich.table import Table

    columns = [column for column in columns if column.least <= screen.width <= column.most]
    drawn = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        footer_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_edge=False,
        show_footer=any(column.footer for column in columns),
    )
    for column in columns:
        justify: Any = "right" if column.right else "left"
        # rich narrows the columns that may wrap. Their texts themselves do not wrap: they are cut.
        header = _on_one_line(column.title)
        drawn.add_column(header, column.footer, justify=justify, no_wrap=not column.shrinks)
    draws = [column.draw or attrgetter(column.title) for column in columns]
    for item in items:
        drawn.add_row(*(_on_one_line(draw(item)) for draw in draws))
    return drawn


def _on_one_line(drawn: Text | str) -> Text:
    text = as_cell(drawn)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def print_table(columns: Iterable[Column], items: Iterable[Any]) -> None:
    """A table on stdout."""
    screen = console()
    screen.print(table(screen, columns, items))


def as_cell(drawn: Text | str) -> Text:
    """Text for a table, drawn or not."""
    return cell(drawn) if isinstance(drawn, str) else drawn


class Show(Protocol):
    """Shows what a command is doing: `done` of `total` steps, bytes or jobs, where that is known."""

    def __call__(self, text: str, done: int = 0, total: int | None = None, /) -> None: ...


@contextmanager
def progress(settings: Invocation, *, every: float = 0.0, on_terminal_only: bool = False) -> Iterator[Show]:
    """A bar on a terminal's stderr; elsewhere a line for each new text, at most one in `every` seconds; nothing with --json."""
    screen = console(stderr=True)
    if screen.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}", style="bold"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda text, done=0, total=None: bar.update(
                task, description=text, completed=done, total=total
            )
        return
    last, due = "", 0.0

    def echo(text: str, done: int = 0, total: int | None = None, /) -> None:
        nonlocal last, due
        # After a colon stand details, for which a line of its own would be too much.
        subject = text.partition(":")[0]
        if not (settings.json or on_terminal_only or subject == last or time.monotonic() < due):
            last, due = subject, time.monotonic() + every
            say(subject, err=True)

    yield echo


# -- texts ----------------------------------------------------------------------------------------------------

_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def rounded(document: Any) -> Any:
    """The document as plain values, with seconds rounded to the millisecond, which is enough for readers."""
    return json.loads(msgspec.json.encode(document), parse_float=lambda text: round(float(text), 3))


def duration_text(duration: Micros) -> str:
    """Two figures that matter: 12 ms, 1.4 s, 3 m 20 s, 2 h 5 m, 4 d."""
    if duration < 0:
        return f"-{duration_text(-duration)}"
    if duration < 1000:
        return f"{duration} µs" if duration else "0 s"
    if duration < 0.9995 * SECOND:
        return f"{duration / 1000:.0f} ms"
    if duration < 59.95 * SECOND:
        return f"{duration / SECOND:.1f} s"
    whole = round(duration / SECOND)
    (unit, size), (smaller, small) = next(pair for pair in pairwise(_UNITS) if whole >= pair[0][1])
    rest = whole % size // small
    return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")


def relative_text(when: Micros, now: Micros) -> str:
    """`3 m ago`, `in 20 s`, `now`."""
    apart = when - now
    if abs(apart) < SECOND // 2:
        return "now"
    return f"in {coarse_text(apart)}" if apart > 0 else f"{coarse_text(-apart)} ago"


def coarse_text(duration: Micros) -> str:
    """One unit, for tables: 20 s, 3 m, 2 h."""
    for unit, size in _UNITS[:-1]:
        if duration >= size * SECOND:
            return f"{duration // (size * SECOND)} {unit}"
    return f"{duration / SECOND:.0f} s"


def kept_text(kept: Micros | None) -> str:
    """A retention: a duration, forever, or not at all."""
    return "forever" if kept is None else duration_text(kept) if kept else "not at all"


def plural(count: int, noun: str) -> str:
    """1 job, 2 jobs."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def count_text(count: int) -> str:
    """At most five characters, for tables."""
    for size, unit in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if count >= size:
            scaled = count / (1000 if unit == "k" else size)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return str(count)
