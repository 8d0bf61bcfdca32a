"""`taskharbor schedules`: list, show and change the schedules of a store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args
from zoneinfo import ZoneInfo

import click

from taskharbor.cli import options as opt
from taskharbor.cli import output as out
from taskharbor.cli.enqueue import payload_of
from taskharbor.cli.errors import BadInput
from taskharbor.cli.options import COUNT, Invocation, flag, option
from taskharbor.cli.output import WIDE, Column, cell, state_cell
from taskharbor.drivers.records import Enqueued
from taskharbor.jobs import SECOND, Micros, to_micros
from taskharbor.schedules import QUEUE, Schedule, ScheduleInfo
from taskharbor.schedules.specification import CatchUpMode, Overlap

_STYLES = {"active": "green", "paused": "yellow", "orphaned": "red"}
_RULES = ("overlap", "catch_up", "catch_up_mode", "jitter", "start", "end", "limit", "pause_on_failure")
_name = click.argument("name")


@click.group(cls=opt.Group, invoke_without_command=True)
def schedules(settings: Invocation) -> None:
    """Schedules: list, show, put, pause, trigger, backfill, delete."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        context.invoke(list_schedules)


@schedules.command("list")
def list_schedules(settings: Invocation) -> None:
    """List schedules. With --app, those that the app no longer declares are orphaned."""
    app = settings.harbor if settings.app else None
    with opt.open_client(settings) as client:
        found, now = client.schedules.list(app=app), client.now()
        if client.settings(QUEUE).paused:
            out.say(f"no schedule makes jobs now: the queue {QUEUE} is paused", err=True)
    if settings.json:
        for one in found:
            out.emit(one)
    elif found:
        columns = (
            Column("name", shrinks=True),
            Column("state", lambda one: cell(one.state, _STYLES.get(one.state, ""))),
            Column("when", lambda one: _when(one.schedule), shrinks=True),
            Column("next", lambda one: _relative(one.next[0] if one.next else None, now)),
            Column("last", lambda one: _relative(one.last, now)),
            Column("job", lambda one: "-" if one.last_state is None else state_cell(one.last_state)),
            Column("missed", lambda one: str(one.missed), right=True, least=WIDE),
            Column("remark", lambda one: one.error or one.note or "", shrinks=True, least=WIDE),
        )
        out.print_table(columns, found)
    else:
        click.echo("no schedules yet", err=True)


@schedules.command()
@_name
def show(settings: Invocation, name: str) -> None:
    """Show a schedule: its next five times in its zone and in UTC, the last tick and what became of its job."""
    with opt.open_client(settings) as client:
        info = client.schedules.get(name)
    out.answer(settings, info, *_lines(info))


def _lines(info: ScheduleInfo) -> list[str]:
    spec = info.schedule
    lines = [f"{info.name}: {info.state}" + (f" ({info.note})" if info.note else "")]
    if spec is not None:
        zone = UTC if spec.zone == "UTC" else ZoneInfo(spec.zone)
        given = {rule: value for rule in _RULES if (value := getattr(spec, rule)) or rule == "catch_up"}
        given["catch_up"] = "one interval" if spec.catch_up is None else spec.catch_up
        rules = [
            f"{rule} {one:g} s" if isinstance(one, float) else f"{rule} {one}" for rule, one in given.items()
        ]
        lines += [f"  when    {_when(spec)}", f"  job     {spec.job} in queue {spec.queue}"]
        lines += [f"  rules   {', '.join(rules)}"]
        lines += [f"  next    {one.astimezone(zone):%a %F %T %z}   {_utc(one)}" for one in info.next]
    last = "-" if info.last is None else f"{_utc(info.last)}   {info.last_job} is {info.last_state}"
    lines.append(f"  last    {last}")
    if info.missed:
        lines.append(f"  missed  {info.missed} of the last 10 ticks have no job of their own")
    return [*lines, *([f"  error   {info.error}"] if info.error else [])]


def _utc(at: datetime) -> str:
    return f"{at:%F %T}Z"


def _relative(at: datetime | None, now: Micros) -> str:
    return "-" if at is None else out.relative_text(to_micros(at), now)


def _when(spec: Schedule | None) -> str:
    if spec is None:
        return "?"
    if spec.every is not None:
        text = out.duration_text(round(float(spec.every) * SECOND))  # type: ignore[arg-type]
        return f"every {text.replace('.0 s', ' s')}"
    return f"{' | '.join(spec.cron or ())} {spec.zone}"


@schedules.command()
@_name
@click.argument("job", metavar="TYPE")
@click.argument("words", metavar="[JSON]", nargs=-1)
@option("--arg -a arguments", "NAME=VALUE", "An argument of the payload; repeat.", multiple=True)
@option("--cron", "EXPR", "5 fields, or 6 with seconds first; repeat for a union.", multiple=True)
@option("--every", opt.duration, "An interval instead: 15s, 10m, 1d.", metavar="DURATION")
@option("--offset", opt.duration, "Moves the interval.", "0s", metavar="DURATION")
@option("--zone", "ZONE", "Of the expressions, like Europe/Berlin.", "UTC")
@option("--start", opt.instant, "No tick before it.", metavar="TIME")
@option("--end", opt.instant, "No tick after it.", metavar="TIME")
@option("--limit", COUNT, "End after so many ticks.")
@option("--overlap", click.Choice(get_args(Overlap)), "If the job before has not ended.", "allow")
@option(
    "--catch-up", opt.duration, "Make missed ticks up to this age.  [default: one interval]", metavar="AGE"
)
@option("--catch-up-mode", click.Choice(get_args(CatchUpMode)), "A job for each, or one for all.", "each")
@option("--jitter", opt.duration, "Spread the jobs over this time.", "0s", metavar="DURATION")
@flag("--pause-on-failure", "Pause when a job is dead.")
@option("--revision", click.IntRange(min=0), "Change nothing if a higher one is stored.")
@option("--queue -q", "QUEUE", "Of the jobs.")
@option("--priority -p", int, "Of the jobs.")
@option("--max-attempts", COUNT, "Executions before a job is dead.")
@option("--timeout", opt.duration, "Longest execution.")
@option("--header -H headers", "K=V", "A header of the jobs; repeat.", multiple=True)
def put(
    settings: Invocation,
    /,
    name: str,
    job: str,
    words: tuple[str, ...],
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Store a schedule that makes jobs of TYPE, or change it. With --app, the declaration of the job counts."""
    app = settings.harbor if settings.app else None
    if app is not None:
        app.require(job)
    options |= {
        "cron": options["cron"] or None,
        "headers": opt.parse_pairs(options["headers"], "--header") or None,
        "payload": payload_of(words, arguments, app.handlers.get(job) if app else None),
    }
    schedule = Schedule(name=name, job=job, **options)
    with opt.open_client(settings, creating=True) as client:
        stored = client.schedules.put(schedule, app=app)
        info = client.schedules.get(name)
    out.answer(settings, info, f"{name}: {'stored' if stored else 'nothing has changed'}", *_lines(info)[1:])


@schedules.command()
@_name
@option("--note", "TEXT", "Why.", "")
def pause(settings: Invocation, name: str, note: str) -> None:
    """Pause a schedule: no more ticks until it is resumed."""
    _change(settings, "pause", name, note)


@schedules.command()
@_name
def resume(settings: Invocation, name: str) -> None:
    """Undo a pause. Its ticks are not made later."""
    _change(settings, "resume", name)


@schedules.command()
@_name
def delete(settings: Invocation, name: str) -> None:
    """Delete a schedule. The jobs that it made stay."""
    _change(settings, "delete", name)


def _change(settings: Invocation, what: str, name: str, *more: str) -> None:
    with opt.open_client(settings) as client:
        getattr(client.schedules, what)(name, *more)
    done = f"{what.removesuffix('e')}ed"
    out.answer(settings, {"name": name, "done": done}, f"{name}: {done}")


@schedules.command()
@_name
def trigger(settings: Invocation, name: str) -> None:
    """Make a job of the schedule now, beside its ticks."""
    with opt.open_client(settings) as client:
        handle = client.schedules.trigger(name)
    out.answer(settings, Enqueued(handle.id, handle.existed), handle.id)


@schedules.command()
@_name
@option("--start", opt.instant, "The first instant.", metavar="TIME")
@option("--end", opt.instant, "The last one.", metavar="TIME")
def backfill(settings: Invocation, name: str, start: datetime | None, end: datetime | None) -> None:
    """Make the jobs of all ticks of a time in the past. A tick is made once, however often it is asked for."""
    if start is None or end is None:
        raise BadInput("say which time: --start and --end")
    with opt.open_client(settings) as client:
        made = client.schedules.backfill(name, start, end)
    out.answer(settings, {"enqueued": made}, f"{out.plural(made, 'job')} enqueued")
