"""The command line. `root` is the command. The modules, in the order in which an invocation passes through them:

- `root`: the command and its subcommands.
- `options`: --url, --json and --debug, accepted before and after the subcommand; options of several commands; kinds of values; a
  client on the chosen URL.
- `app_loading`: the app for `module:name`.
- `enqueue`: adds jobs.
- `worker`: runs jobs, in processes or on Spark's executors.
- `broker`: serves a store.
- `jobs`: lists and inspects jobs.
- `queues`: queues and statistics.
- `dlq`: cancels jobs; dead jobs.
- `doctor`: checks and migrations.
- `pipeline`: the Spark pipeline, and made-up histories for it.
- `demo`: the demo.
- `output`: tables, progress, durations and times as text. JSON documents are the models of the HTTP API
  (`taskharbor.broker.models`).
- `errors`: errors and exit codes.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The console script."""
    from taskharbor.cli.root import root

    try:
        root.main()
    except SystemExit as end:
        if "duckdb" in sys.modules:
            # Threads of Arrow may outlive their query for a moment, and crash a process that takes down what they use.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(end.code or 0))
        raise


__all__ = ["main"]
