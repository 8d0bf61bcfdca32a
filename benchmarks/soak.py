"""`make soak`: the suite's randomised tests with large counts, for hours instead of seconds.

`make test` runs a sample of each stage. Every run takes new seeds and writes them, with counts and outcomes, to
`soak.json` beside this file. The last result is committed. A stage that fails prints the command that replays it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).with_name("soak.json")
ONCE = 2**31
"""Seeds are below this."""


class Stage(msgspec.Struct, frozen=True):
    """Tests that take their seed, and some their count, from the environment."""

    name: str
    unit: str
    tests: tuple[str, ...]
    count: int
    seeds: tuple[str, ...]
    """Variables that get the seed."""
    counts: str | None = None
    """Variable that gets the count. None: the tests run that many times, each with a seed of its own."""


STAGES = (
    Stage(
        "simulation of workers, cuts and skewed clocks",
        "seeds",
        ("tests/simulation/test_guarantees.py", "-k", "test_every_guarantee"),
        count=20_000,
        seeds=("TASKHARBOR_FIRST_SEED",),
        counts="TASKHARBOR_SEEDS",
    ),
    Stage(
        "schedules over a day of virtual time",
        "seeds",
        ("tests/schedules/test_simulated.py", "-k", "test_no_tick"),
        count=10_000,
        seeds=("TASKHARBOR_SCHEDULE_FIRST_SEED",),
        counts="TASKHARBOR_SCHEDULE_SEEDS",
    ),
    Stage(
        "workers killed while they make the jobs of schedules, on three drivers",
        "kills each",
        ("tests/schedules/test_kills.py",),
        count=334,
        seeds=("TASKHARBOR_SCHEDULE_KILL_SEED",),
        counts="TASKHARBOR_SCHEDULE_KILLS",
    ),
    Stage(
        "state machine against the model, on every driver",
        "histories each",
        ("tests/conformance", "-k", "test_state_machine", "-m", "not installed"),
        count=300,
        seeds=("TASKHARBOR_CONFORMANCE_SEED",),
        counts="TASKHARBOR_CONFORMANCE_EXAMPLES",
    ),
    Stage(
        "workers and brokers killed and frozen",
        "runs",
        (
            "tests/chaos",
            "tests/drivers/postgres/test_postgres_chaos.py",
            "tests/drivers/redis/test_redis_chaos.py",
            "tests/drivers/sqlite/test_sqlite_chaos.py",
        ),
        count=20,
        seeds=(
            "TASKHARBOR_OBJECTSTORE_CHAOS_SEED",
            "TASKHARBOR_POSTGRES_CHAOS_SEED",
            "TASKHARBOR_REDIS_CHAOS_SEED",
            "TASKHARBOR_SQLITE_CHAOS_SEED",
        ),
    ),
    Stage(
        "connections cut at random places",
        "runs",
        (
            "tests/drivers/postgres/test_postgres_outages.py",
            "tests/drivers/redis/test_redis_outages.py",
            "tests/drivers/http/test_http_outages.py",
        ),
        count=20,
        seeds=("TASKHARBOR_POSTGRES_CUT_SEED", "TASKHARBOR_REDIS_CUT_SEED", "TASKHARBOR_HTTP_CUT_SEED"),
    ),
    Stage(
        "pipeline runs killed at random points, on a folder and on an object store",
        "kills each",
        ("tests/spark/test_lake_kills.py",),
        count=50,
        seeds=("TASKHARBOR_LAKE_SEED",),
        counts="TASKHARBOR_LAKE_KILLS",
    ),
    Stage(
        "fuzzed requests to a broker, over five stores",
        "requests each",
        ("tests/broker/test_fuzz_tokens.py",),
        count=200_000,
        seeds=("TASKHARBOR_FUZZ_SEED",),
        counts="TASKHARBOR_FUZZ_REQUESTS",
    ),
)


class Result(msgspec.Struct, frozen=True):
    """One stage of one soak."""

    stage: str
    count: int
    unit: str
    seeds: list[int]
    minutes: float
    failed: list[str]
    """Commands that replay what failed."""


def run(stage: Stage, count: int, rng: random.Random) -> Result:
    began = time.monotonic()
    seeds, failed = [], []
    for variables in _environments(stage, count, rng):
        seeds.append(int(variables[stage.seeds[0]]))
        pytest = [
            "-m",
            "pytest",
            "-q",
            "-n",
            "auto",
            "--dist",
            "loadgroup",
            "--timeout",
            "7200",
            *stage.tests,
        ]
        done = subprocess.run([sys.executable, *pytest], cwd=ROOT, env={**os.environ, **variables})
        if done.returncode:
            settings = " ".join(f"{name}={value}" for name, value in variables.items())
            failed.append(f"{settings} python {' '.join(pytest)}")
    minutes = round((time.monotonic() - began) / 60, 1)
    return Result(stage.name, count, stage.unit, seeds, minutes, failed)


def _environments(stage: Stage, count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(1 if stage.counts else count):
        seed = str(rng.randrange(ONCE))
        variables = dict.fromkeys(stage.seeds, seed)
        if stage.counts:
            variables[stage.counts] = str(count)
        yield variables


@click.command("python -m benchmarks.soak")
@click.option("--scale", default=1.0, show_default=True, type=click.FloatRange(0, min_open=True))
@click.option("--seed", type=int, help="Draw the seeds of the stages from this one.")
@click.option("--only", help="Run the stages whose name contains this text. Nothing is written.")
@click.pass_context
def main(context: click.Context, scale: float, seed: int | None, only: str | None) -> None:
    """Run every stage with its full count, times --scale, and write the result to soak.json."""
    console = Console()
    rng = random.Random(seed)
    chosen = [stage for stage in STAGES if only is None or only in stage.name]
    if not chosen:
        raise click.UsageError(f"--only {only}: no stage has this text in its name")
    results = []
    for stage in chosen:
        console.rule(stage.name)
        results.append(run(stage, max(1, round(stage.count * scale)), rng))
    table = Table("stage", "count", "minutes", "failed")
    for one in results:
        table.add_row(one.stage, f"{one.count:,} {one.unit}", f"{one.minutes:g}", str(len(one.failed)))
        for command in one.failed:
            console.print(f"replay: {command}", highlight=False, soft_wrap=True)
    console.print(table)
    if only is None:
        report = {"ended": f"{datetime.now(UTC):%Y-%m-%d}", "stages": results}
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    context.exit(1 if any(one.failed for one in results) else 0)


if __name__ == "__main__":
    main()
