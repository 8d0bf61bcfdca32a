"""The command line. `root` is the command; the modules beside it have the subcommands, those on one subject together.

They share `options` (--url, --json and --debug, accepted before and after the subcommand; options of several commands; values; a
client on the chosen URL), `apps` (the app that `module:name` means), `problems` (errors and exit codes) and `output` (tables,
progress, durations and times as text). JSON documents are the models of the HTTP API (`taskharbor.broker.models`).
rich is imported where something is drawn, never at import time, so `taskharbor --help` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from taskharbor.cli.root import root

    root.main()


__all__ = ["main"]
