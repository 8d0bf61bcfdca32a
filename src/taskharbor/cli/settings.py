"""What every subcommand understands: --url, --json and --debug, on either side of the subcommand's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from taskharbor.harbor import DEFAULT_URL

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Settings:
    """One invocation's settings, filled in by the options as they are parsed; every command gets it as its first argument."""

    argv: list[str] = field(default_factory=list)
    """The command line as it came, for children that run the same one."""
    url: str = DEFAULT_URL
    url_is_default: bool = True
    url_is_explicit: bool = False
    """Given on the command line: stronger than what an app says of itself."""
    json: bool = False
    debug: bool = False


def shared_options(function: F) -> F:
    """--url, --json and --debug. They go to `Settings`, not to the command's parameters."""
    for option in (
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=_remember_flag,
            help="Show tracebacks of errors.",
        ),
        click.option(
            "--json",
            is_flag=True,
            expose_value=False,
            callback=_remember_flag,
            help="Answer in JSON, errors too.",
        ),
        click.option(
            "--url",
            metavar="URL",
            expose_value=False,
            callback=_remember_url,
            help=f"The store.  [default: $TASKHARBOR_URL, else {DEFAULT_URL}]",
        ),
    ):
        function = option(function)
    return function


def _remember_flag(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if value and parameter.name is not None:
        setattr(context.ensure_object(Settings), parameter.name, True)
    return value


def _remember_url(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    settings = context.ensure_object(Settings)
    if not value:
        return value
    explicit = context.get_parameter_source("url") is ParameterSource.COMMANDLINE
    if explicit or not settings.url_is_explicit:
        settings.url = value
        settings.url_is_default = False
        settings.url_is_explicit = explicit
    return value
