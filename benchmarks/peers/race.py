"""The race itself: every contender does the same three things, in turns, on the same server, each in a database of its own.

Bulk enqueue, as its library recommends; a drain of those jobs by one worker process, from the first handler's start until
the backend holds none that is not acknowledged (asked only once every handler has run); and idle pick-up, from the call
that enqueues to the handler's start. Whoever cannot be installed or fails is listed with the reason.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.measure import Series
from benchmarks.peers.child import Child, ContenderFailed
from benchmarks.peers.contender import Contender
from benchmarks.peers.installed import CannotInstall, Launcher, install
from benchmarks.peers.track import Track

STARTUP = 60.0
PATIENCE = 180.0
PICK_UP_WITHIN = 20.0


class Result(msgspec.Struct, kw_only=True):
    name: str
    settings: str
    versions: list[str]
    jobs: int
    enqueue: Series
    drain: Series
    pick_up: Series
    failure: str = ""


def race(
    track: Track,
    cache: Path,
    quick: bool,
    say: Callable[[str], None],
    contenders: Sequence[Contender] = (),
) -> list[Result]:
    """Three rounds in which everybody takes part once, or those that are named; one short one when `quick`."""
    contenders = contenders or track.contenders
    known: tuple[type[Exception], ...] = (CannotInstall, ContenderFailed, *track.failures)
    results = {one.name: _result(one, one.jobs // 10 if quick else one.jobs) for one in contenders}
    for number in range(1 if quick else 3):
        for contender in contenders:
            result = results[contender.name]
            if result.failure:
                continue
            say(f"round {number + 1}: {contender.name} ...")
            try:
                track.admit(contender)
                launcher = install(contender, cache)
                enqueued, drained = _drain(track, contender, launcher, result.jobs)
                result.enqueue.runs.append(enqueued)
                result.drain.runs.append(drained)
                result.pick_up.runs.append(_pick_up(track, launcher, 30 if quick else 200))
            except known as problem:
                result.failure = f"{type(problem).__name__}: {problem}"
                say(f"{contender.name} is out. {result.failure}")
    return list(results.values())


def _result(contender: Contender, jobs: int) -> Result:
    return Result(
        name=contender.name,
        settings=contender.settings,
        versions=list(contender.python or contender.node),
        jobs=jobs,
        enqueue=Series("bulk enqueue", "jobs/s", []),
        drain=Series("drain", "jobs/s", []),
        pick_up=Series("idle pick-up", "ms", []),
    )


def _prepare(launcher: Launcher, url: str) -> None:
    with Child(launcher, url, "prepare") as child:
        child.wait(STARTUP)


def _drain(track: Track, contender: Contender, launcher: Launcher, count: int) -> tuple[float, float]:
    """Jobs per second enqueued, and drained."""
    with track.fresh() as url:
        _prepare(launcher, url)
        with Child(launcher, url, "fill", str(count)) as producer:
            filling = producer.answer("filled", PATIENCE)
            producer.wait(STARTUP)
        track.settle_down()
        with (
            track.asking(url) as ask,
            Child(launcher, url, "drain", str(count)) as worker,
        ):
            first = worker.answer("first", STARTUP)
            worker.answer("last", PATIENCE)
            give_up = time.monotonic() + STARTUP
            while left := ask(contender, count):
                if time.monotonic() > give_up:
                    raise ContenderFailed(f"all handlers have run, but {left} jobs are not acknowledged")
                time.sleep(0.002)
            return count / filling, count / (time.monotonic() - first)


def _pick_up(track: Track, launcher: Launcher, count: int) -> float:
    """Median milliseconds. The next job comes only after the last has started, and never in step with anybody's polling."""
    pauses = random.Random(0)
    delays = []
    with track.fresh() as url:
        _prepare(launcher, url)
        with Child(launcher, url, "serve") as worker, Child(launcher, url, "produce") as producer:
            producer.answer("ready", STARTUP)
            for n in range(count + 1):
                producer.ask()
                began = producer.answer("enqueued", PICK_UP_WITHIN)
                started = worker.answer("started", STARTUP if n == 0 else PICK_UP_WITHIN)
                if n:  # The first one also waits for the worker to start.
                    delays.append(started - began)
                time.sleep(pauses.uniform(0.01, 0.05))
    return statistics.median(delays) * 1000
