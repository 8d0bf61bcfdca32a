"""`python -m taskharbor_testkit.simulation`: run many seeds, or one of them line by line."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from taskharbor_testkit.simulation.planted import PLANTED
from taskharbor_testkit.simulation.world import simulate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m taskharbor_testkit.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the seed to begin with")
    parser.add_argument("--seed", type=int, metavar="N", help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: show every event, line by line")
    parser.add_argument("--bug", choices=sorted(PLANTED), help="plant a bug and see whether it is found")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error("--seeds: at least 1")
    seeds = range(options.first, options.first + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    run = PLANTED[options.bug].simulate if options.bug else simulate
    began = time.perf_counter()
    failed = 0
    for seed in seeds:
        report = msgspec.structs.replace(run(seed), bug=options.bug)
        failed += not report.is_ok
        if options.trace:
            print("\n".join(report.trace))
        if options.seed is not None or not report.is_ok:
            print(report)
        if options.seed is not None:
            counted = ", ".join(f"{number} {name}" for name, number in report.counts.items())
            print(f"  {counted}\n  digest {report.digest}")
    elapsed = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {failed} failed, {len(seeds) / elapsed:.0f} per second")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
