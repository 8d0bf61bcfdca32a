"""What goes to stdout: JSON for programs, rich for people. Nothing stored in a job can steer the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from taskharbor.jobs import JobState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPED_WIDTH = 200
"""Columns where nobody looks at a terminal: enough not to cut anything that a script may want."""

GAP = 2
NARROWEST = 6

STATE_STYLES = {
    JobState.SCHEDULED: "blue",
    JobState.READY: "cyan",
    JobState.BLOCKED: "magenta",
    JobState.INFLIGHT: "yellow",
    JobState.DONE: "green",
    JobState.DEAD: "red",
    JobState.CANCELLED: "bright_black",
}

SHORT_STATES = {
    JobState.SCHEDULED: "sched",
    JobState.READY: "ready",
    JobState.BLOCKED: "block",
    JobState.INFLIGHT: "run",
    JobState.DONE: "done",
    JobState.DEAD: "dead",
    JobState.CANCELLED: "canc",
}
"""For narrow terminals."""


def emit(document: Any) -> None:
    """One JSON document on one line."""
    click.echo(msgspec.json.encode(document).decode())


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    wide = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(file=stream, width=wide, highlight=False, markup=False, emoji=False)


def plain(text: str) -> str:
    """Stored text as it may be shown: control characters (escape sequences above all) made visible."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else f"\\x{ord(character):02x}"
        for character in text
    )


def cell(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(plain(text).replace("\n", " "), style=style)


def state_cell(state: JobState) -> Text:
    return cell(str(state), STATE_STYLES[state])


class Column(NamedTuple):
    title: str
    right: bool = False
    shrinks: int = 0
    """Where a row is too wide, the columns with the highest number give way first; those with 0 never do."""
    footer: str = ""


def table(
    screen: Console, columns: Sequence[Column], rows: Sequence[Sequence[Text]], *, title: str | None = None
) -> Table:
    """Columns with no lines but one under the header: reads well, copies well, fits narrow terminals.

    rich would narrow all columns alike, ids too; so the widths are chosen here.
    """
    from rich import box
    from rich.table import Table

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
    for column, width in zip(columns, _widths(screen.width, columns, rows), strict=True):
        drawn.add_column(
            column.title,
            column.footer,
            justify="right" if column.right else "left",
            width=width,
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _widths(available: int, columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> list[int]:
    widths = [
        max([len(column.title), len(column.footer), *(row[index].cell_len for row in rows)])
        for index, column in enumerate(columns)
    ]
    excess = sum(widths) + GAP * (len(columns) - 1) + 1 - available
    for index in sorted(range(len(columns)), key=lambda index: -columns[index].shrinks):
        if excess > 0 and columns[index].shrinks:
            given = min(excess, max(0, widths[index] - NARROWEST))
            widths[index] -= given
            excess -= given
    return widths


def is_narrow(screen: Console) -> bool:
    return screen.width < 90
