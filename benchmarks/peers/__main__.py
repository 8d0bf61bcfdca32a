"""`python -m benchmarks.peers CONTENDER URL COMMAND [N]`: one contender's side of a race, started by `race.py`."""

from __future__ import annotations

import importlib
import sys

from benchmarks.peers.program import Program, run


def main(contender: str, url: str, command: str, count: str = "0") -> None:
    program: type[Program] = importlib.import_module(f"benchmarks.peers.{contender}").Contestant
    run(program(url), command, int(count))


if __name__ == "__main__":
    main(*sys.argv[1:])
