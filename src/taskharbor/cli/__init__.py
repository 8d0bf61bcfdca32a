"""The command line. `root` is the command, one file per subcommand beside it.

What they share: `settings` (--url, --json, --debug, accepted before and after the subcommand), `store` (a client on the
chosen URL), `problems` (errors and exit codes), `output` (tables and JSON), `values` (durations and times as text).
rich is imported where something is drawn, never at import time, so `taskharbor --help` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from taskharbor.cli.root import root

    root.main()


__all__ = ["main"]
