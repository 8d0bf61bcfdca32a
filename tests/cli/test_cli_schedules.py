"""`taskharbor schedules` and `taskharbor worker --prune-schedules`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.cli_harness import Run, lines
from taskharbor import Schedule
from taskharbor.client import Client, portal
from taskharbor.jobs import SECOND, to_datetime
from taskharbor.schedules import QUEUE
from taskharbor.schedules.client import AsyncSchedules, put
from taskharbor.schedules.specification import request_of, stored_schedule
from taskharbor.schedules.ticking import tick

APP = """
from datetime import datetime
from taskharbor import Harbor

harbor = Harbor()

@harbor.job(queue="reports", {cron})
async def report(at: datetime, n: int = 1) -> None: ...
"""


def test_put_show_change_and_delete(run: Run, client: Client) -> None:
    put = [
        "schedules",
        "put",
        "daily",
        "report",
        '{"n": 1}',
        "--cron",
        "30 2 * * *",
        "--zone",
        "Europe/Berlin",
    ]
    shown = run(*put, "--overlap", "skip", "--catch-up", "6h", "--header", "a=b").stdout
    assert "daily: stored" in shown
    assert shown.count("  next    ") == 5
    assert "02:30:00 +0" in shown
    assert "30 2 * * * Europe/Berlin" in shown
    assert (
        "nothing has changed" in run(*put, "--overlap", "skip", "--catch-up", "6h", "--header", "a=b").stdout
    )
    (info,) = lines(run("schedules", "--json"))
    assert (info["name"], info["state"], info["schedule"]["catch_up"]) == ("daily", "active", 21600)
    assert info["schedule"]["payload"] == {"n": 1}
    run("schedules", "pause", "daily", "--note", "holidays")
    assert "daily: paused (holidays)" in run("schedules", "show", "daily").stdout
    assert "holidays" in run("schedules", "list").stdout
    run("schedules", "resume", "daily")
    job_id = run("schedules", "trigger", "daily").stdout.strip()
    assert client.get(job_id).headers["taskharbor.schedule"] == "daily"
    assert json.loads(run("schedules", "delete", "daily", "--json").stdout) == {
        "name": "daily",
        "done": "deleted",
    }
    assert "no schedules yet" in run("schedules").stderr


def test_backfill(run: Run, client: Client) -> None:
    run("schedules", "put", "poll", "poll", "--every", "10m", "--max-attempts", "1")
    now = client.now()
    start, end = (to_datetime(now - hours * 3600 * SECOND).isoformat() for hours in (2, 1))
    assert run("schedules", "backfill", "poll", "--start", start, "--end", end).stdout == "6 jobs enqueued\n"
    assert "say which time" in run("schedules", "backfill", "poll", "--start", start, code=2).stderr


def test_mistakes(run: Run, client: Client) -> None:
    client.configure("default", create=True)
    assert "there is no schedule 'x'" in run("schedules", "show", "x", code=1).stderr
    assert "minute '61' is wrong" in run("schedules", "put", "x", "t", "--cron", "61 * * * *", code=2).stderr
    assert "give either cron or every" in run("schedules", "put", "x", "t", code=2).stderr
    assert "did you mean 'schedules'" in run("cron", code=2).stderr
    put = ["schedules", "put", "x", "t"]
    assert "every 0.5: at least 1 second" in run(*put, "--every", "500ms", code=2).stderr
    assert "zone 'Mars' is not known" in run(*put, "--every", "5m", "--zone", "Mars", code=2).stderr
    assert "from 1 to 10000" in run(*put, "--every", "5m", "--limit", "10001", code=2).stderr
    assert "no schedules yet" in run("schedules").stderr


def test_with_an_app_the_declaration_counts(run: Run, client: Client) -> None:
    Path("scheduled_jobs.py").write_text(APP.format(cron='cron="0 3 * * *"'))
    put = ["-A", "scheduled_jobs", "schedules", "put", "mine", "report", "--every", "1d"]
    (info,) = lines(run(*put, "--arg", "n=2", "--json"))
    assert (info["schedule"]["queue"], info["schedule"]["payload"], info["origin"]) == (
        "reports",
        {"n": 2},
        None,
    )
    assert (
        "declares no job 'rapport'"
        in run("-A", "scheduled_jobs", "schedules", "put", "x", "rapport", code=2).stderr
    )
    run("worker", "scheduled_jobs", "--until-empty")
    assert [one.name for one in client.schedules.list()] == ["mine", "report"]
    Path("scheduled_later.py").write_text(APP.format(cron="max_attempts=2"))
    assert "orphaned" not in run("-A", "scheduled_later", "schedules").stdout
    run("worker", "scheduled_jobs", "--until-empty", "--prune-schedules")
    assert len(client.schedules.list()) == 2
    stored = client.schedules.get("report")
    assert stored.origin == "scheduled_jobs"


def test_orphans_are_deleted_only_when_asked_and_only_those_of_the_apps_own_code(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("pruned_app").mkdir()
    Path("pruned_app/old.py").write_text(
        APP.format(cron='cron="0 3 * * *"') + "harbor.schedule('kept', report, every=60)"
    )
    Path("pruned_app/new.py").write_text(
        APP.format(cron="").replace("Harbor()", "Harbor(imports=['pruned_app.more'])")
    )
    Path("pruned_app/more.py").write_text(
        "from pruned_app.new import harbor, report\nharbor.schedule('kept', report, every=60)"
    )
    run("worker", "pruned_app.old", "--until-empty")
    client.schedules.put(Schedule(name="at-run-time", job="report", every=60))
    run("worker", "pruned_app.new", "--until-empty")
    assert "report       orphaned" in run("-A", "pruned_app.new", "schedules").stdout
    names = ["at-run-time", "kept"]
    deleted: list[str] = []
    delete = AsyncSchedules.delete

    async def delete_second(self: AsyncSchedules, name: str) -> None:
        deleted.append(name)
        await delete(self, name)  # Another process is quicker.
        await delete(self, name)

    monkeypatch.setattr(
        "taskharbor.schedules.client.Schedules.delete",
        lambda self, name: portal().call(delete_second(self._inner, name)),
    )
    run("worker", "pruned_app.new", "--until-empty", "--prune-schedules")
    assert [one.name for one in client.schedules.list()] == names
    assert deleted == ["report"]


def test_what_is_shown_of_ticks(run: Run, client: Client) -> None:
    run(
        "schedules",
        "put",
        "tidy",
        "tidy",
        "--every",
        "1m",
        "--overlap",
        "skip",
        "--jitter",
        "5s",
        "--catch-up",
        "0s",
    )
    empty = run("schedules", "show", "tidy").stdout
    assert "when    every 1 m" in empty
    assert "rules   overlap skip, catch_up 0 s, catch_up_mode each, jitter 5 s" in empty
    assert "  last    -" in empty
    assert "missed" not in empty

    past, spec = client.now() - 600 * SECOND, Schedule(name="tidied", job="tidy", every=60, overlap="skip")

    async def make_ticks() -> None:
        stored = stored_schedule(spec, request_of(spec), client._inner.builder, past)
        await put(client.driver, stored, past)
        for seconds in (0, 60, 120):
            await tick(client.driver, past + seconds * SECOND, "w")

    portal().call(make_ticks())
    shown = run("schedules", "show", "tidied").stdout
    assert re.search(r"  last    \S+ \S+Z   tick:tidied:\S+ is ready\n", shown)
    assert re.search(r"  missed  [12] of the last 10 ticks have no job of their own\n", shown)
    assert "  error   Skipped: job tick:tidied:" in shown
    assert "every 15 s" in run("schedules", "put", "poll", "poll", "--every", "15s").stdout
    assert "rules   overlap allow, catch_up one interval" in run("schedules", "show", "poll").stdout


def test_a_list_says_that_the_queue_of_the_schedules_is_paused(run: Run, client: Client) -> None:
    run("schedules", "put", "s", "t", "--every", "60s")
    before = run("schedules", "list", "--json")
    assert before.stderr == ""
    client.pause(QUEUE)
    after = run("schedules", "list", "--json")
    assert "the queue taskharbor.schedules is paused" in after.stderr
    assert after.stdout == before.stdout
