"""`taskharbor doctor`: checks the installation and the backend, and gives advice.

It knows drivers by their contract, so it works the same on any driver. A driver whose server decides if jobs are safe says so by
`server_findings`; only Redis does.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeAlias

import click
import msgspec

import taskharbor
from taskharbor.cli.errors import FAILED
from taskharbor.cli.options import Invocation, command, flag, store_file
from taskharbor.cli.output import answer, duration_text, emit, plural, say
from taskharbor.client import portal
from taskharbor.drivers.contract import Driver
from taskharbor.drivers.registry import connect, installed_drivers
from taskharbor.drivers.urls import shown_url
from taskharbor.errors import Forbidden, InvalidRequest, TaskHarborError
from taskharbor.jobs import SECOND, JobState, Micros
from taskharbor.requests import new_id

Verdict: TypeAlias = Literal["ok", "warn", "fail"]

SLOW_ROUND_TRIP: Micros = 50_000
LARGE_OFFSET: Micros = 2 * SECOND
ANSWER_SECONDS = 10.0
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Check(msgspec.Struct, frozen=True):
    """One line of the doctor's report."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@command()
@flag("--repair", "Set aside stored jobs that no worker could load.")
def doctor(settings: Invocation, repair: bool) -> int:
    """Check the installation, the store and the clock."""
    checks = asyncio.run(_examine(settings, repair))
    failed = any(check.verdict == "fail" for check in checks)
    if settings.json:
        emit({"ok": not failed, "url": shown_url(settings.url), "checks": checks})
    else:
        for check in checks:
            click.secho(f"{check.verdict:<5}", fg=_COLOURS[check.verdict], nl=False)
            say(f"{check.name:<11} {check.found}")
            if check.advice:
                say(f"{'':<16} -> {check.advice}")
    return FAILED if failed else 0


async def _examine(settings: Invocation, repairs: bool) -> list[Check]:
    checks = [Check("python", "ok", f"{platform.python_version()} at {sys.executable}"), _packages()]
    try:
        driver = connect(settings.url)
    except TaskHarborError as error:
        return [*checks, Check("driver", "fail", str(error), "mend --url or TASKHARBOR_URL")]
    scheme = settings.url.partition("://")[0]
    origin = installed_drivers()[scheme].value.partition(":")[0]
    checks.append(Check("driver", "ok", f"{shown_url(settings.url)} by {origin}"))
    if not hasattr(driver, "server_findings"):
        checks.append(_promises(driver))
    file = store_file(settings.url)
    if file is not None:
        checks.append(_file(file))
        if checks[-1].verdict == "fail" or not file.exists():
            return checks
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            async for check in _backend(driver):
                checks += [check]
        if repairs:
            checks.append(await _repair(driver))
    except (TaskHarborError, OSError) as error:
        # A timeout of the doctor's own is an OSError without a message.
        found = str(error) or f"{shown_url(settings.url)}: no answer within {ANSWER_SECONDS:g} s"
        # A refusal says itself what to do.
        advice = "" if isinstance(error, InvalidRequest) else "is it running, and is the URL right?"
        if "damaged" in found:  # Every driver says so in this word.
            advice = "stored data are damaged: restore them as said above"
        checks.append(Check("backend", "fail", found, advice))
    finally:
        await driver.close()
    return checks


def _packages() -> Check:
    found = [f"taskharbor {taskharbor.__version__}"]
    missing = []
    for name in ("msgspec", "click", "rich"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    advice = f"pip install {' '.join(missing)}" if missing else ""
    return Check("packages", "fail" if missing else "ok", ", ".join(found), advice)


def _promises(driver: Driver) -> Check:
    able = driver.capabilities
    lacks = [] if able.durable else ["jobs die with the process"]
    lacks += [] if able.multi_process else ["only this process sees them"]
    advice = "fine for tests; use sqlite:///jobs.db to keep jobs" if lacks else ""
    kept = "jobs survive every process; many processes can share the store"
    return _warning_if(advice, "promises", "; ".join(lacks) or kept)


def _warning_if(advice: str, name: str, found: str) -> Check:
    return Check(name, "warn" if advice else "ok", found, advice)


def _file(file: Path) -> Check:
    path, folder = file.absolute(), file.absolute().parent
    if not folder.is_dir():
        return Check("folder", "fail", f"{folder} does not exist", f"mkdir -p {shlex.quote(str(folder))}")
    if not os.access(folder, os.W_OK | os.X_OK):
        advice = "SQLite writes files beside the database"
        return Check("folder", "fail", f"{folder} is not writable for this user", advice)
    if not file.exists():
        return Check("file", "warn", f"{path} is not there yet", "the first enqueue or worker makes it")
    if file.is_dir():
        return Check("file", "fail", f"{path} is a folder", "name the file in it: sqlite:///folder/jobs.db")
    if not os.access(file, os.R_OK | os.W_OK):
        return Check("file", "fail", f"{path} is not readable and writable for this user", "check its owner")
    return Check("file", "ok", f"{path}, {file.stat().st_size / 1_048_576:.1f} MiB, writable")


async def _backend(driver: Driver) -> AsyncIterator[Check]:
    missing = await driver.migrate(dry_run=True)
    if missing:
        steps = f"{len(missing)} steps to take: {', '.join(missing)}"
        yield Check("schema", "warn", steps, "taskharbor migrate")
    await driver.open()
    if not missing:
        yield Check("schema", "ok", "up to date")
    if hasattr(driver, "server_findings"):
        for finding in await driver.server_findings():
            yield _warning_if(*finding)
    best = min([await _timed(driver.settings("default")) for _ in range(5)])
    slow = "every batch waits that long: run workers near the backend" if best > SLOW_ROUND_TRIP else ""
    yield _warning_if(slow, "round trip", f"a read takes {duration_text(best)}")
    yield await _write(driver)
    wall = time.time_ns() // 1000
    backend_time = await driver.time()
    offset = abs(backend_time - (wall + time.time_ns() // 1000) // 2)
    advice = "leases follow the backend's clock, so nothing breaks; check NTP on this host all the same"
    found = f"this host is {duration_text(offset)} off the backend"
    yield _warning_if(advice if offset > LARGE_OFFSET else "", "clock", found)
    stats = await driver.stats(now=await driver.time())
    counts = {state: sum(one.counts.get(state, 0) for one in stats) for state in JobState}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no jobs"
    yield Check("queues", "ok", f"{plural(len(stats), 'queue')}, {told}")
    paused = [one.queue for one in stats if one.settings.paused]
    if paused:
        yield Check("paused", "warn", ", ".join(paused), f"taskharbor queues resume {shlex.join(paused)}")


async def _write(driver: Driver) -> Check:
    """Check that the store accepts writes. It may answer readers and refuse writers: a full disk, a replica, a limit on
    memory."""
    name = f"staging/doctor/{new_id()}/0"
    try:
        took = await _timed(driver.put_blob(name, bytes(4096)))
        await driver.drop_blobs([name])
    except Forbidden:
        # The trial is a blob, and only bulk writes need those: producers and workers lack nothing.
        found = "not tried: this token has no scope bulk, which only writers of DataFrames need"
        return Check("write", "ok", found)
    except (InvalidRequest, NotImplementedError) as error:
        return Check("write", "warn", f"not tried: {error}")
    except TaskHarborError as error:
        advice = "nothing can be enqueued or ended until it takes writes again"
        return Check("write", "fail", str(error), advice)
    return Check("write", "ok", f"a write takes {duration_text(took)}")


async def _repair(driver: Driver) -> Check:
    """Set aside stored jobs that no worker could load. However many jobs there are, all of them are looked at."""
    if not hasattr(driver, "repair"):
        advice = "run it where the store is: a broker's clients cannot repair it"
        return Check("repair", "warn", "not possible with this driver", advice)
    found: list[str] = await driver.repair()
    advice = "look at them with `taskharbor dlq`, and find out what wrote them" if found else ""
    return _warning_if(advice, "repair", "; ".join(found) or "no damaged jobs")


async def _timed(call: Awaitable[object]) -> Micros:
    before = time.perf_counter_ns()
    await call
    return (time.perf_counter_ns() - before) // 1000


@command()
@flag("--dry-run", "Only say what would be done.")
def migrate(settings: Invocation, dry_run: bool) -> None:
    """Bring the store's schema up to date."""
    driver, call = connect(settings.url), portal().call
    try:
        steps = call(driver.migrate(dry_run=dry_run))
    finally:
        call(driver.close())
    lines = [f"{'would apply' if dry_run else 'applied'} {step}" for step in steps]
    answer(settings, {"steps": steps, "dry_run": dry_run}, *(lines or ["up to date"]))
