"""`taskharbor stats`: every queue at a glance, once or live."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from taskharbor.cli.documents import stats_document
from taskharbor.cli.output import SHORT_STATES, STATE_STYLES, Column, cell, console, emit, is_narrow, table
from taskharbor.cli.settings import Settings, shared_options
from taskharbor.cli.store import open_client, shown_url
from taskharbor.cli.values import coarse_text, count_text
from taskharbor.client import Client
from taskharbor.drivers.contract import QueueStats
from taskharbor.jobs import JobState, Micros

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text


@click.command()
@click.option("--queue", "-q", metavar="QUEUE", help="Only this queue.")
@click.option("--watch", "-w", is_flag=True, help="Stay, and show changes until Ctrl-C.")
@click.option(
    "--interval",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds between looks.",
)
@click.option("--times", type=click.IntRange(min=1), help="With --watch: end after so many looks.")
@shared_options
@click.pass_obj
def stats(settings: Settings, queue: str | None, watch: bool, interval: float, times: int | None) -> None:
    """Show queues: jobs per state, lag, totals."""
    with open_client(settings) as client:
        if not watch:
            taken, now = client.stats(queue), client.now()
            if settings.json:
                emit({"queues": [stats_document(one, now) for one in taken]})
            else:
                screen = console()
                screen.print(view(taken, now, screen))
            return
        try:
            _watch(client, settings, _looks(client, queue, interval, times))
        except KeyboardInterrupt:
            pass  # The way to end it, not an error.


def _looks(
    client: Client, queue: str | None, interval: float, times: int | None
) -> Iterator[tuple[list[QueueStats], Micros]]:
    pause = threading.Event()
    while True:
        yield client.stats(queue), client.now()
        if times is not None:
            times -= 1
            if times == 0:
                return
        pause.wait(interval)


def _watch(client: Client, settings: Settings, looks: Iterator[tuple[list[QueueStats], Micros]]) -> None:
    if settings.json:
        for taken, now in looks:
            emit({"queues": [stats_document(one, now) for one in taken]})
        return
    from rich.console import Group
    from rich.live import Live

    screen = console()
    rate = Rate()
    with Live(console=screen, auto_refresh=False, transient=False) as live:
        for taken, now in looks:
            pace = rate.update(taken)
            line = f"{shown_url(settings.url)}  {time.strftime('%H:%M:%S')}  {pace}Ctrl-C ends this"
            live.update(Group(cell(line, "bright_black"), view(taken, now, screen)), refresh=True)


class Rate:
    """How many jobs end per second, between two looks."""

    def __init__(self) -> None:
        self._before: tuple[float, int] | None = None

    def update(self, taken: list[QueueStats]) -> str:
        ended = sum(map(_ended_ever, taken))
        now = time.monotonic()
        before, self._before = self._before, (now, ended)
        if before is None or now <= before[0]:
            return ""
        return f"{(ended - before[1]) / (now - before[0]):.0f} jobs/s  "


def view(taken: list[QueueStats], now: Micros, screen: Console) -> RenderableType:
    """The table, with a sum under it where there are several queues."""
    if not taken:
        return cell("no queues yet: the first enqueue makes one")
    narrow, several = is_narrow(screen), len(taken) > 1
    columns = [Column("queue", shrinks=1, footer="all" if several else "")]
    # A narrow screen has no room for columns of zeros.
    states = [
        one
        for one in JobState
        if not narrow or one is JobState.READY or any(q.counts.get(one) for q in taken)
    ]
    for state in states:
        total = count_text(sum(one.counts.get(state, 0) for one in taken))
        title = SHORT_STATES[state] if narrow else str(state)
        columns.append(Column(title, right=True, footer=total if several else ""))
    columns.append(Column("lag", right=True))
    if not narrow:
        ever = count_text(sum(map(_ended_ever, taken)))
        columns.append(Column("ended ever", right=True, footer=ever if several else ""))
    rows = []
    for one in taken:
        row = [
            cell(one.queue),
            *(_count(state, one.counts.get(state, 0)) for state in states),
            _lag(one, now),
        ]
        rows.append(row if narrow else [*row, cell(count_text(_ended_ever(one)))])
    return table(screen, columns, rows)


def _ended_ever(one: QueueStats) -> int:
    return one.done_total + one.dead_total + one.cancelled_total


def _count(state: JobState, count: int) -> Text:
    return cell(count_text(count), STATE_STYLES[state] if count else "bright_black")


def _lag(one: QueueStats, now: Micros) -> Text:
    """How long the next job has been waiting past its time. A paused queue lags on purpose."""
    if one.settings.paused:
        return cell("paused", "yellow")
    if one.head_run_at_us is None or one.head_run_at_us >= now:
        return cell("-", "bright_black")
    return cell(coarse_text(now - one.head_run_at_us))
