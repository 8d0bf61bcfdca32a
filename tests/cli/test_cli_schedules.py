"""`taskharbor schedules` and `taskharbor worker --prune-schedules`."""

from __future__ import annotations

import json
from pathlib import Path

from cli.cli_harness import Run, lines
from taskharbor.client import Client
from taskharbor.jobs import SECOND, to_datetime

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
