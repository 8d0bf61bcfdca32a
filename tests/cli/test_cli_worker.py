"""`taskharbor worker`: which app, which store, how it ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.cli_harness import Run
from records import present
from taskharbor.cli.worker import child_command
from taskharbor.client import Client
from taskharbor.jobs import JobRequest, JobState

APP = """
from taskharbor import Harbor

harbor = Harbor({url})

@harbor.job
async def greet(name: str) -> str:
    return f"Hello, {{name}}"

@harbor.job
def slow(seconds: float) -> None:
    raise AssertionError("nobody enqueues it")
"""
_numbers = itertools.count()

MakeApp = Callable[..., str]


@pytest.fixture
def make_app(tmp_path: Path) -> MakeApp:
    """Write an app into the current folder; its module's name, new every time."""

    def make(url: str = "sqlite:///own.db", text: str = APP) -> str:
        name = f"jobs_{os.getpid()}_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text.format(url=repr(url) if url else ""))
        return name

    return make


def enqueue(count: int = 3) -> None:
    with Client("sqlite:///own.db") as client:
        client.enqueue_many(JobRequest(type="greet", payload={"name": "Ada"}) for _ in range(count))


def states() -> set[JobState]:
    with Client("sqlite:///own.db") as client:
        return {job.state for job in client.list_jobs().jobs}


def test_drains_the_apps_own_store_and_exits_with_0(run: Run, make_app: MakeApp) -> None:
    enqueue()
    result = run("worker", f"{make_app()}:harbor", "--until-empty", "--log-format", "json", "--name", "w")
    messages = [json.loads(line)["message"] for line in result.stderr.splitlines()]
    assert states() == {JobState.DONE}
    assert messages[0] == "worker w serves default"
    assert any("stopped after 3 executions" in message for message in messages)


def test_queues_by_weight_or_in_strict_order_with_limits(run: Run, make_app: MakeApp) -> None:
    enqueue()
    app, until = make_app(), ["--until-empty", "--wait-for-retries"]
    run("worker", app, *until, "-q", "default=5", "-q", "mail", "--limit", "default=1")
    assert states() == {JobState.DONE}
    said = run("worker", app, *until, "-q", "default", "-q", "mail", "--strict").stderr
    assert "serves default, mail" in said
    assert "no job of the app is in queue mail; the app has default" in said
    assert "no job of the app" not in run("worker", app, "--until-empty", "-q", "default").stderr


@pytest.mark.parametrize(
    "command",
    [
        ("worker", "APP", "--until-empty"),
        ("worker", "--until-empty", "--app", "APP"),
        ("enqueue", "--app", "APP", "greet", '{"name": "Ada"}'),
        ("--app", "APP", "migrate"),
    ],
)
@pytest.mark.parametrize("made", ["given", "own", "environment", "taskharbor"])
def test_one_precedence_of_stores(run: Run, make_app: MakeApp, command: tuple[str, ...], made: str) -> None:
    """--url, the app's, the environment's, the default. A variable that loses is reported once, without its secrets."""
    app = make_app("" if made in ("environment", "taskharbor") else "sqlite:///own.db")
    args = [app if word == "APP" else word for word in command]
    args += ["--url", "sqlite:///given.db"] if made == "given" else []
    variable = "sqlite:///environment.db?token=secret"[: 24 if made == "environment" else None]
    said = run(*args, env={} if made == "taskharbor" else {"TASKHARBOR_URL": variable}).stderr
    assert [path.name for path in Path().glob("*.db")] == [f"{made}.db"]
    reason = {"given": "another store is given", "own": f"the app {app} has a store of its own"}.get(made)
    note = f"note: TASKHARBOR_URL=sqlite:///environment.db?token=*** is not used: {reason}"
    assert said.count("note: ") == said.count(note) == (reason is not None)


def test_an_app_is_named_once(run: Run, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    assert f"apps found here: {app}:harbor" in run("worker", code=2).stderr
    assert "names another one" in run("worker", "--app", app, "other:app", code=2).stderr
    monkeypatch.setenv("TASKHARBOR_APP", app)
    run("worker", "--until-empty")
    monkeypatch.setenv("TASKHARBOR_APP", "lost:app")
    assert "TASKHARBOR_APP=lost:app is not used" in run("worker", app, "--until-empty").stderr


def test_an_app_with_a_driver_has_no_url(run: Run, make_app: MakeApp) -> None:
    text = APP.replace("{url}", "MemoryDriver()").replace(
        "import Harbor", "import Harbor\nfrom taskharbor.drivers.memory import MemoryDriver"
    )
    app = make_app(text=text)
    run("worker", app, "--until-empty")
    assert "has a driver and no URL" in run("list", "--app", app, code=2).stderr


@pytest.mark.parametrize("more", [[], ["--processes", "2"]])
def test_an_app_without_jobs_refuses_to_start(run: Run, make_app: MakeApp, more: list[str]) -> None:
    app = make_app(text="from taskharbor import Harbor\nharbor = Harbor({url})")
    assert "declares no job" in run("worker", app, *more, code=2).stderr


@pytest.mark.parametrize(
    ("text", "named", "complaint"),
    [
        (APP, "no_such_module", "apps found here: {app}:harbor"),
        (APP, "no_such_package.jobs:app", "no module named 'no_such_package'"),
        (APP, "{app}:app", "it has {app}:harbor"),
        (APP, "{app}:slow", "is a SyncJobType, not a Harbor"),
        (APP, "{app}.py:harbor", "try {app}:harbor"),
        ("x = 1", "{app}", "nothing in it is a Harbor"),
        ("from taskharbor import Harbor\na, b = Harbor(), Harbor()", "{app}", "{app}:a or {app}:b"),
        ("import taskharbor\n1 / 0", "{app}", "ZeroDivisionError: division by zero"),
        ("import taskharbor\n1 / 0", "{app}", "{app}.py, line 2"),
        ("from taskharbor import Harbor\n\nHarbor('what')", "{app}", "/{app}.py, line 3)"),
        ("def f(:", "{app}", "SyntaxError"),
        ("import a_package_nobody_has", "{app}", "importing {app} failed: ModuleNotFoundError"),
        (
            "from taskharbor import Harbor\nharbor = Harbor(imports=['nopkg.x'])",
            "{app}",
            "No module named 'nopkg'; the app imports 'nopkg.x': see its imports=",
        ),
    ],
)
def test_no_app(run: Run, make_app: MakeApp, text: str, named: str, complaint: str) -> None:
    """One that cannot be loaded is met with what can be, or with where it failed."""
    app = make_app(text=text)
    assert complaint.format(app=app) in run("worker", named.format(app=app), code=2).stderr


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--lease", "0.2"], "at least 1 s"),
        (["--health", "0.0.0.0:8080"], "--health-public"),
        (["--processes", "2", "--url", "memory://"], "lives in one process"),
        (["--concurrency", "0"], "--concurrency"),
        (["--limit", "mail"], "write it like mail=2"),
        (["--limit", "default=0"], "limit 0 of queue 'default': give a whole number from 1"),
        (["--queue", "mail=0"], "weight 0 of queue 'mail': give a whole number from 1"),
        (["--queue", "mail=x"], "'mail=x': write it like mail=2, with a whole number after the ="),
        (["--limit", "mail=2"], "limits for mail: this worker serves default"),
        (["--queue", "a=2", "--queue", "b", "--strict"], "queues={'a': 2, 'b': 1} has weights"),
        (["--wait-for-retries"], "give that too"),
        (["--concurrency", "many"], "'many' is not a whole number"),
        (["--type", "gret"], "declares no job 'gret': did you mean 'greet'?"),
        (["--type", "x", "--processes", "2"], "it declares greet, slow"),
    ],
)
def test_bad_options_are_refused(run: Run, make_app: MakeApp, args: list[str], complaint: str) -> None:
    assert complaint in run("worker", make_app(), *args, code=2).stderr


def test_a_childs_command_line_takes_back_what_is_the_parents() -> None:
    argv = ["--url", "memory://", "worker", "--processes", "4", "--reload", "--health", "1", "--", "app"]
    own = ["--processes", "1", "--no-reload", "--health", "off", "--supervised", "7", "--name", "w-3"]
    command = child_command(argv, 3, 7, {"name": "w", "processes": 4})
    assert command[3:] == [*argv[:8], *own, *argv[8:]]


# -- real processes ---------------------------------------------------------------------------------------------


@contextmanager
def worker(*args: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "taskharbor", "worker", *args, "--log-format", "json"]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=null, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], part: str, times: int = 1) -> str:
    """Read the log until something was said so often; the last line that said it."""
    seen = []
    for line in present(process.stderr):
        seen.append(line)
        if part in line:
            times -= 1
            if times == 0:
                return line
    raise AssertionError(f"the worker never said {part!r}:\n{''.join(seen)}")


def test_several_processes_drain_together(make_app: MakeApp) -> None:
    enqueue(200)
    with worker(make_app(), "--processes", "2", "--until-empty") as process:
        assert process.wait(timeout=60) == 0
    assert states() == {JobState.DONE}


def test_a_killed_child_is_replaced_and_all_stop_on_one_signal(make_app: MakeApp) -> None:
    with worker(make_app(), "--processes", "2", "--name", "w") as process:
        pid = int(until(process, "worker process 1 started").partition("pid ")[2].partition('"')[0])
        until(process, "serves", times=2)
        os.kill(pid, signal.SIGKILL)
        assert "SIGKILL" in until(process, "starts again")
        until(process, "worker w-1 serves")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_worker_that_lost_threads_ends_or_is_replaced(make_app: MakeApp, processes: str) -> None:
    app = make_app(
        text=APP.replace(
            'raise AssertionError("nobody enqueues it")', "import threading; threading.Event().wait()"
        )
    )
    with Client("sqlite:///own.db") as client:
        payload = {"seconds": 0}
        client.enqueue_many(
            JobRequest(type="slow", payload=payload, timeout=0.05, max_attempts=1) for _ in range(8)
        )
    # Of eight in one or two workers, one loses four at least.
    with worker(app, "--processes", processes, "--grace", "50ms") as process:
        until(process, "4 threads are lost")
        if processes == "1":
            assert process.wait(timeout=60) == 4
        else:
            assert "exit code 4" in until(process, "starts again")
            until(process, "serves")


def test_children_go_when_the_parent_is_killed(make_app: MakeApp) -> None:
    with worker(make_app(), "--processes", "2") as process:
        until(process, "serves", times=2)
        process.kill()
        process.wait(timeout=30)
        # The children write to the same pipe: its end comes when the last of them is gone.
        rest = present(process.stderr).read()
    assert rest.count("the parent process is gone") == 2


def test_an_app_that_changes_is_reloaded(make_app: MakeApp, tmp_path: Path) -> None:
    name = make_app()
    file = tmp_path / f"{name}.py"
    with worker(name, "--reload") as process:
        until(process, "serves")
        file.write_text("this is not python")
        until(process, "changed: restarting")
        until(process, "a change of a file starts it again")
        file.write_text(APP.format(url=repr("sqlite:///own.db")))
        until(process, "serves")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
