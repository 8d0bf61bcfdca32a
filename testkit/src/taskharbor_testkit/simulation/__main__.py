"""`python -m taskharbor_testkit.simulation`: run many seeds, or one of them line by line."""

from __future__ import annotations

import argparse
import sys
import time

from taskharbor_testkit.simulation.planted import PLANTED
from taskharbor_testkit.simulation.report import Report, simulate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m taskharbor_testkit.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many seeds (default: 1000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the seed to begin with")
    parser.add_argument("--seed", type=int, metavar="N", help="run this seed only")
    parser.add_argument("--trace", action="store_true", help="with --seed: show what happened, line by line")
    parser.add_argument("--bug", choices=sorted(PLANTED), help="plant a bug and see whether it is found")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    run = PLANTED[options.bug].simulate if options.bug else simulate
    began = time.perf_counter()
    failed = 0
    for seed in seeds:
        report = run(seed)
        if options.trace:
            print("\n".join(report.trace.lines()))
        if not report.is_ok:
            failed += 1
            print(report)
        elif options.seed is not None:
            _describe(report)
    elapsed = time.perf_counter() - began
    print(f"{len(seeds)} seeds, {failed} failed, {len(seeds) / elapsed:.0f} per second")
    return 1 if failed else 0


def _describe(report: Report) -> None:
    print(
        f"{report}\n  {report.jobs} jobs, {report.leases} leases, {report.expired} of them expired, "
        f"{report.executions} executions, {report.calls} calls in {report.virtual_seconds:.1f} virtual seconds"
        f"\n  digest {report.digest}"
    )


if __name__ == "__main__":
    sys.exit(main())
