"""Options of the commands: the common ones, those of several commands, and kinds of values; the app and the store that they
name, and a client on it, or a clear error."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import unquote

import click
from click.core import ParameterSource

from taskharbor.cli.app_loading import apps_nearby, load_app
from taskharbor.cli.errors import BadInput, CommandFailed
from taskharbor.client import Client
from taskharbor.drivers.urls import shown_url
from taskharbor.harbor import DEFAULT_URL, Harbor
from taskharbor.printable import printable, printable_json

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)")
_WHOLE = re.compile(rf"(?:{_PART.pattern}\s*)+")
_LONGEST = 100 * 366 * 86_400.0
FOREVER = timedelta.max
COUNT = click.IntRange(min=1)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


# -- values ---------------------------------------------------------------------------------------------------


# A function as the type of an option: its name is the value's name in the help.


def duration(text: str) -> timedelta:
    """`90`, `1.5s`, `10m`, `2h30m`, `7d`."""
    written = text.strip().lower()
    try:
        seconds = float(written)
    except ValueError:
        parts = _PART.findall(written) if _WHOLE.fullmatch(written) else [(-1, "s")]
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 <= seconds <= _LONGEST:
        wanted = "write seconds, or like 500ms, 30s, 10m, 2h30m, 7d"
        raise click.BadParameter(f"{text!r} is not a duration: {wanted}")
    return timedelta(seconds=seconds)


def age(text: str) -> timedelta:
    """A duration, or `FOREVER`."""
    return FOREVER if text.lower() in ("forever", "none", "never") else duration(text)


def instant(text: str) -> datetime:
    """ISO 8601; without a zone it is this computer's local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        wanted = "write like 2026-08-01T09:30 (local) or 2026-08-01T09:30Z"
        raise click.BadParameter(f"{text!r} is not a time: {wanted}") from None


def count_or_none(text: str) -> int:
    """A number from 1, or `none`; 0 stands for none, which the contract writes as None."""
    if text.lower() == "none":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r}: a whole number from 1, or none; to stop a queue, pause it")
    return int(text)


def parse_pairs(pairs: tuple[str, ...], option: str, example: str = "name=value") -> dict[str, str]:
    """`k=v` options as a mapping."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{pair!r}: write it like {option} {example}")
        parsed[name] = value
    return parsed


# -- options of every command ---------------------------------------------------------------------------------


@dataclass
class Invocation:
    """One invocation's settings, filled in by the options as they are parsed; every command gets it as its first argument.

    Attributes:
        argv: The command line as it came, for children that run the same one.
        modules: Modules that declare more jobs of the app.
    """

    argv: list[str] = field(default_factory=list)
    given_url: str | None = None
    environment_url: str | None = None
    given_app: str | None = None
    environment_app: str | None = None
    modules: tuple[str, ...] = ()
    json: bool = False
    debug: bool = False

    @property
    def app(self) -> str | None:
        """The app by name, if one was named."""
        return self.given_app or self.environment_app

    @property
    def named_app(self) -> str:
        """The app by name, for a command that needs one."""
        if self.app is None:
            said = "which app? Either name it like jobs:harbor, or set TASKHARBOR_APP"
            raise BadInput(said, hint=apps_nearby())
        return self.app

    @cached_property
    def loaded(self) -> Harbor:
        """The app, imported."""
        self._report_loser("TASKHARBOR_APP", self.environment_app, self.named_app, "another app is named")
        return load_app(self.named_app, *self.modules)

    @cached_property
    def imposed_url(self) -> str | None:
        """The store that the app is told to use: --url, or the environment's for an app without one. None: it keeps its own."""
        own = None if self.given_url or self.app is None else self.loaded.url
        if (chosen := self.given_url or own) is None:
            return self.environment_url or DEFAULT_URL
        winner = "another store is given" if self.given_url else f"the app {self.app} has a store of its own"
        self._report_loser("TASKHARBOR_URL", self.environment_url, chosen, winner, shown_url)
        return self.given_url

    @property
    def url(self) -> str:
        """The store: --url, else the app's, else the environment's, else the default."""
        chosen = self.imposed_url or self.loaded.url
        if isinstance(chosen, str):
            return chosen
        raise BadInput(f"the app {self.app} has a driver and no URL", hint="name its store with --url")

    @cached_property
    def harbor(self) -> Harbor:
        """The app on the chosen store."""
        harbor, url = self.loaded, self.imposed_url
        if url is not None:
            harbor.use(url)
        return harbor

    def _report_loser(
        self, variable: str, value: str | None, chosen: object, why: str, show: Callable[[str], str] = str
    ) -> None:
        # A worker's parent has said so for its children.
        if value is not None and value != chosen and "--supervised" not in self.argv:
            text = f"{variable}={show(value)} is not used: {why}"
            click.echo(printable_json({"note": text}) if self.json else printable(f"note: {text}"), err=True)


def together(*options: Callable[..., Any]) -> Callable[[F], F]:
    """Several options as one decorator, in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def option(names: str, kind: Any, help: str, default: Any = None, **more: Any) -> Callable[[F], F]:
    """An option with a value. `names` are separated by blanks; `kind` is the value's type, or a text's name in the help."""
    if isinstance(kind, str):
        more["metavar"] = kind
    else:
        is_number = isinstance(kind, (click.IntRange, click.FloatRange)) or kind is int
        more |= {"type": kind, "metavar": more.get("metavar", "N" if is_number else None)}
    return click.option(*names.split(), help=help, default=default, **more)


def flag(names: str, help: str, **more: Any) -> Callable[[F], F]:
    """An option without a value. `names` are separated by blanks."""
    return click.option(*names.split(), is_flag=True, help=help, **more)


def _remember(context: click.Context, parameter: click.Parameter, value: str | bool | None) -> None:
    name = parameter.name or ""
    if isinstance(value, str):
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        name = f"{'given' if is_given else 'environment'}_{name}"
    if value:
        setattr(context.ensure_object(Invocation), name, value)


class Command(click.Command):
    """A command with --app, --url, --json and --debug, on either side of its name. They go to `Invocation`, which the command is
    given.

    `has_store`: False for a command that uses no store, or one that it makes.
    """

    def __init__(self, *given: Any, has_store: bool = True, **more: Any) -> None:
        super().__init__(*given, **more)
        self.has_store = has_store
        switch: dict[str, Any] = {"is_flag": True, "expose_value": False, "callback": _remember}
        name: dict[str, Any] = {"expose_value": False, "callback": _remember, "hidden": not has_store}
        app = "The app.  [default: $TASKHARBOR_APP]"
        store = f"The store.  [default: the app's, else $TASKHARBOR_URL, else {DEFAULT_URL}]"
        self.params += [
            click.Option(["--app", "-A"], metavar="MODULE:APP", help=app, **name),
            click.Option(["--url"], metavar="URL", help=store, **name),
            click.Option(["--json"], help="Answer in JSON, errors too.", **switch),
            click.Option(["--debug"], help="Show tracebacks of errors.", **switch),
        ]
        if self.callback is not None:
            self.callback = click.pass_obj(self.callback)

    def invoke(self, ctx: click.Context) -> Any:
        if not self.has_store and ctx.ensure_object(Invocation).given_url:
            raise BadInput(f"`{ctx.command_path}` does not use your store: leave out --url")
        return super().invoke(ctx)


command = partial(click.command, cls=Command)


class Group(Command, click.Group):
    """A group of commands. For a mistyped name, the error suggests the most similar command.

    Attributes:
        other_names: Names that other tools have for a command, which a mistyped name is not.
    """

    command_class = Command
    other_names: ClassVar[dict[str, str]] = {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            other = self.other_names.get(args[0])
            near = [other] if other else difflib.get_close_matches(args[0], known, n=1, cutoff=0.5)
            suggestion = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"
            raise click.UsageError(f"no command {args[0]!r}{suggestion}", ctx)
        return super().resolve_command(ctx, args)


# -- options of several commands ------------------------------------------------------------------------------


queue_option = option("--queue -q", "QUEUE", "Only this queue.")

log_options = together(
    click.option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"])),
    option("--log-format", click.Choice(["text", "json"]), "The log. --json means json.", "text"),
    flag("--no-tracebacks", "Errors in one line: no tracebacks in the log."),
)


def _by_queue(_: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> Any:
    """`QUEUE=N` options as a mapping. For --queue, N is a weight and may be left out."""
    counts: dict[str, int] = {}
    for pair in pairs:
        queue, equals, count = pair.rpartition("=")
        if queue and count.isdecimal():
            counts[queue] = int(count)
        elif parameter.name == "queues" and not equals:
            counts[pair] = 1
        else:
            raise click.BadParameter(f"{pair!r}: write it like mail=2, with a whole number after the =")
    return pairs if counts.keys() <= set(pairs) else counts


def set_up_logs(settings: Invocation, options: dict[str, Any]) -> None:
    """Set up the log of a command that serves. With --json or --log-format json, every line on stderr is JSON."""
    from taskharbor.worker.logs import set_up_logs

    settings.json = settings.json or options["log_format"] == "json"
    options["log_format"] = "json" if settings.json else "text"
    set_up_logs(options["log_level"], options["log_format"], tracebacks=not options["no_tracebacks"])


_per_queue = partial(option, multiple=True, callback=_by_queue)
# Options of everything that runs jobs.
worker_options = together(
    _per_queue("--queue -q queues", "QUEUE[=WEIGHT]", "Serve this queue; repeat.  [default: the app's]"),
    option("--strict order", None, "Serve a queue only if those before it are empty.", flag_value="strict"),
    _per_queue("--limit limits", "QUEUE=N", "Jobs of it at once, per worker."),
    option("--type -t types", "TYPE", "Run only this type; repeat.  [default: all]", multiple=True),
    option("--concurrency -c", COUNT, "Jobs at once, per worker process.", 20),
    option("--lease", duration, "How long the jobs of a worker that died wait.", "15s"),
    option("--poll-interval", duration, "Between looks at an idle queue.", "1s"),
    option("--prefetch", click.IntRange(min=0), "Most jobs to lease ahead.", 4000),
    option("--grace", duration, "How long a stop waits for jobs.", "30s"),
    flag("--until-empty", "Stop when nothing is left to do."),
    flag("--wait-for-retries", "With --until-empty: stop when also no retry waits."),
    option("--max-jobs", COUNT, "Stop each worker after so many jobs."),
    option("--max-seconds", duration, "Stop after so long."),
)


def chosen_options(options: dict[str, Any]) -> dict[str, Any]:
    """A worker's options as keyword arguments of `Harbor.worker`; an option that was not given is left out."""
    from taskharbor.worker import Worker

    if options["wait_for_retries"]:
        if not options["until_empty"]:
            raise click.UsageError("--wait-for-retries says when --until-empty stops: give that too")
        options = {**options, "until_empty": "retries"}
    return {
        name: value
        for name in inspect.signature(Worker).parameters
        if (value := options.get(name)) not in (None, ())
    }


# -- the store ------------------------------------------------------------------------------------------------


def open_client(settings: Invocation, *, creating: bool = False) -> closing[Client]:
    """A client for the time of a command. Only commands that add something may make a new database file. They get the app's
    client, if an app is named: its defaults and codecs count."""
    if creating and settings.url == "memory://":
        hint = "name another store with --url or TASKHARBOR_URL"
        raise BadInput("memory:// is a new store inside this process: it ends with the command", hint=hint)
    if not creating:
        require_store(settings)
    return closing(settings.harbor.client if creating and settings.app else Client(settings.url))


def require_store(settings: Invocation) -> None:
    """Refuse a store file that does not exist. A new empty database would answer a wrong --url with "no jobs"."""
    file = store_file(settings.url)
    if file is None or file.exists():
        return
    if settings.url == DEFAULT_URL:
        said = f"there is no {file} in {Path.cwd()}"
        other = "name the app with --app, or the store with --url or TASKHARBOR_URL"
        hint = f"go to your app's folder, or {other}; the first `taskharbor enqueue` makes one"
    else:
        said = f"there is no database {file} (from {shown_url(settings.url)})"
        hint = "sqlite:///name.db is relative to the current folder, sqlite:////path/name.db is absolute"
    raise CommandFailed(said, hint=hint, kind="no_store")


def store_file(url: str) -> Path | None:
    """The file that an SQLite URL names; None for every other store."""
    scheme, _, rest = url.partition("://")
    if scheme != "sqlite" or not rest.startswith("/"):
        return None
    return Path(unquote(rest[1:].partition("?")[0]))
