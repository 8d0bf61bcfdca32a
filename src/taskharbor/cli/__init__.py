"""The command line. `root` is the command. The modules, in the order in which an invocation passes through them:

- `root`: the command and its subcommands.
- `options`: --url, --json and --debug, accepted before and after the subcommand; options of several commands; kinds of values; a
  client on the chosen URL.
- `app_loading`: the app for `module:name`.
- `enqueue`, `worker`, `broker`: add jobs, run them, serve a store.
- `jobs`, `queues`, `dlq`: list and inspect jobs; queues and statistics; cancel, and dead jobs.
- `doctor`, `pipeline`, `demo`: checks and migrations; the Spark pipeline; the demo.
- `output`: tables, progress, durations and times as text. JSON documents are the models of the HTTP API
  (`taskharbor.broker.models`).
- `errors`: errors and exit codes.
"""

from __future__ import annotations


def main() -> None:
    """The console script."""
    from taskharbor.cli.root import root

    root.main()


__all__ = ["main"]
