"""The command `taskharbor`: its subcommands in the order people need them, and one place where errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import click
from click.shell_completion import get_completion_class

import taskharbor
from taskharbor.cli.broker import broker
from taskharbor.cli.demo import demo
from taskharbor.cli.dlq import cancel, dlq
from taskharbor.cli.doctor import doctor, migrate
from taskharbor.cli.enqueue import enqueue
from taskharbor.cli.errors import report
from taskharbor.cli.jobs import inspect, list_jobs
from taskharbor.cli.lake import lake
from taskharbor.cli.options import Group, Invocation, command
from taskharbor.cli.pipeline import history, pipeline
from taskharbor.cli.queues import queues, stats
from taskharbor.cli.schedules import schedules
from taskharbor.cli.worker import spark_worker, worker

_INSTALL = {
    "bash": "echo 'eval \"$(taskharbor completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(taskharbor completion zsh)\"' >> ~/.zshrc",
    "fish": "taskharbor completion fish > ~/.config/fish/completions/taskharbor.fish",
}


@command(has_store=False, epilog="\b\nTo install:\n" + "\n".join(f"  {line}" for line in _INSTALL.values()))
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def completion(settings: Invocation, shell: str) -> None:
    """Print the completion script of a shell."""
    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(root, {}, "taskharbor", "_TASKHARBOR_COMPLETE").source())


SECTIONS: tuple[tuple[str, tuple[click.Command, ...]], ...] = (
    ("Start here", (demo, worker, enqueue)),
    ("Look", (stats, list_jobs, inspect)),
    ("Operate", (queues, schedules, cancel, dlq, broker, spark_worker)),
    ("Analyse", (pipeline, lake, history)),
    ("Set up", (doctor, migrate, completion)),
)


class Root(Group):
    """Says errors in its own words, and orders its help."""

    other_names: ClassVar[dict[str, str]] = {
        other: name
        for name, others in (
            ("worker", "run start work"),
            ("enqueue", "send push add call defer"),
            ("stats", "status info monitor"),
            ("inspect", "show get job"),
            ("list", "jobs ls failed"),
            ("queues pause", "pause"),
            ("queues resume", "resume"),
            ("schedules", "cron schedule beat"),
            ("cancel", "stop revoke"),
            ("dlq requeue", "retry requeue"),
            ("dlq purge", "purge delete remove"),
            ("broker", "serve server"),
            ("doctor", "check health"),
        )
        for other in others.split()
    }

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> Any:
        argv = list(sys.argv[1:] if args is None else args)
        # Looked at before parsing, so that an error in parsing is in JSON as well.
        settings = Invocation(argv=argv, json="--json" in argv, debug="--debug" in argv)
        is_process = extra.pop("standalone_mode", True)
        extra |= {"prog_name": "taskharbor", "standalone_mode": False, "obj": settings}
        try:
            answer = super().main(args=None if args is None else argv, **extra)
            code = answer if isinstance(answer, int) else 0
        except (Exception, KeyboardInterrupt) as error:
            code = report(error, settings)
        if is_process:
            sys.exit(code)
        return code

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS:
            with formatter.section(title):
                rows = [(command.name or "", command.get_short_help_str(70)) for command in commands]
                formatter.write_dl(rows)


@click.group(
    cls=Root,
    invoke_without_command=True,
    context_settings={
        "auto_envvar_prefix": "TASKHARBOR",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
    epilog="Every option is also an environment variable: TASKHARBOR_URL, TASKHARBOR_JSON, "
    "TASKHARBOR_WORKER_CONCURRENCY, TASKHARBOR_LIST_LIMIT, and so on.",
)
@click.version_option(taskharbor.__version__, "-V", "--version", message="taskharbor %(version)s")
def root(settings: Invocation) -> None:
    """TaskHarbor: a leased job queue. `taskharbor demo` shows what it can take."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for _, _commands in SECTIONS:
    for _command in _commands:
        root.add_command(_command)

if os.environ.get("NO_COLOR"):
    root.context_settings["color"] = False
