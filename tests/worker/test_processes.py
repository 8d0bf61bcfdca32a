"""Handlers in processes of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from records import present
from taskharbor import (
    Harbor,
    InvalidRequest,
    Job,
    JobHandle,
    JobRequest,
    JobState,
    Outcome,
    ResultNotKept,
    Worker,
)
from taskharbor.client import Client
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.worker.processes import WorkerProcess
from worker import isolated
from worker.stage import PATIENCE, eventually, logged, running

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes are tested where SIGKILL is")


@pytest.fixture(autouse=True)
def harbor() -> Harbor:
    """The handlers' app, on a store of this test's own."""
    isolated.harbor.use(MemoryDriver())
    isolated.harbor.middleware.clear()
    return isolated.harbor


def drain(**options: Any) -> Worker:
    worker = isolated.harbor.worker(**{"until_empty": True, "concurrency": 1, **options})
    worker.run()
    return worker


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Worker]:
    """A worker runs beside the block."""
    worker = isolated.harbor.worker(**{"concurrency": 1, **options})
    async with running(worker):
        yield worker
    await isolated.harbor.close_async()


def is_alive(pid: int) -> bool:
    """Not a zombie either: one of those is only waiting to be noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def is_written(path: Path) -> int:
    """What a handler wrote there, once it has: its process's id."""
    await eventually(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def last_error(handle: JobHandle[Any]) -> str:
    return present(handle.record().last_error)


# -- results and errors ---------------------------------------------------------------------------------------------


def test_handlers_run_on_the_main_thread_of_one_process_that_is_kept(harbor: Harbor) -> None:
    seen: list[tuple[int, Any]] = []

    async def layer(job: Job, call_next: Any) -> Any:
        seen.append((os.getpid(), await call_next(job)))
        return seen[-1][1]

    harbor.middleware.append(layer)
    nested = {"when": [1, None, {"deep": True}], "big": 2**60}
    handles: list[JobHandle[Any]] = [
        isolated.add.enqueue(1, b=2),
        isolated.add_async.enqueue(3),
        isolated.declared_elsewhere.enqueue(21),
        isolated.add.options(codec="msgpack").enqueue(5),
        isolated.add.options(codec="rot13").enqueue(6),
        isolated.echo.enqueue(nested),
    ]
    raw = harbor.enqueue("raw", [1, 2])
    # A payload that is larger than any socket's buffer, and results that are too large or have no form.
    not_kept = [isolated.echo.enqueue("x" * 1_000_000), isolated.without_form.enqueue()]
    callers = [isolated.who.enqueue() for _ in range(2)]
    async_callers = [isolated.who_async.enqueue() for _ in range(2)]
    invalid = harbor.client.enqueue(JobRequest(type="add", payload={"a": "one"}))
    worker = harbor.worker(until_empty=True, concurrency=1)
    worker.register("raw", isolated.takes_job, isolation="process")
    with logged() as told:
        worker.run()
    results = [3, 4, 42, 6, 7, nested]
    assert [handle.result(PATIENCE) for handle in handles] == results
    # Middleware runs here and sees plain results.
    assert seen[:6] == [(os.getpid(), result) for result in results]
    assert raw.result(PATIENCE) == [raw.id, "[1,2]", "raw"]
    # That a result cannot be kept is no reason to do the work again.
    for one in not_kept:
        with pytest.raises(ResultNotKept):
            one.result(PATIENCE)
    assert told.count("is not kept") == 2
    assert last_error(invalid).startswith("PayloadInvalid")
    first, second = (caller.result(PATIENCE) for caller in callers)
    pid, thread, variable = first
    assert first == second
    assert pid != os.getpid()
    # What one job binds to a context variable, the next does not see.
    assert (thread, variable) == ("MainThread", "clean")
    first_async, second_async = (caller.result(PATIENCE) for caller in async_callers)
    assert first_async == (first, second_async[1])
    assert first_async == second_async
    assert not is_alive(pid)


def test_an_error_keeps_its_type_message_and_traceback_and_a_signal_its_times(harbor: Harbor) -> None:
    kinds = {"custom": "Custom: of our own", "exit": "SystemExit: 7", "stop": "RuntimeError"}
    kinds |= {"keyboard": "KeyboardInterrupt", "cancelled": "CancelledError"}
    cases = [(name, kind) for name in ("fail", "fail_async") for kind in kinds]
    handles = [harbor.enqueue(name, {"kind": kind}) for name, kind in cases]
    signals = ("retry", "snooze", "discard", "unrecoverable")
    retry, snooze, discard, declined = map(isolated.fail.enqueue, signals)
    drain()
    for (name, kind), handle in zip(cases, handles, strict=True):
        assert handle.state() is JobState.DEAD, kind
        first, *trace = last_error(handle).splitlines()
        assert first.startswith(kinds[kind])
        if (name, kind) != ("fail_async", "stop"):  # Python makes that a RuntimeError where we await it.
            assert "isolated.py" in "\n".join(trace), kind
        assert "child.py" not in "\n".join(trace), kind
    record = retry.record()
    ended = (record.state, record.attempts, record.last_error)
    assert ended == (JobState.SCHEDULED, 1, "Retry: in an hour")
    assert 3500 < (record.run_at - present(record.failed_at)).total_seconds() <= 3600
    record = snooze.record()
    assert (record.state, record.attempts, record.stalls) == (JobState.SCHEDULED, 0, 0)
    assert (discard.state(), last_error(discard)) == (JobState.CANCELLED, "Cancel: stale")
    assert (declined.state(), last_error(declined)) == (JobState.DEAD, "Declined: no money")


# -- while it runs --------------------------------------------------------------------------------------------------


async def test_a_job_can_be_asked_reports_progress_and_is_spared_terminal_signals(tmp_path: Path) -> None:
    started, go_on = tmp_path / "started", tmp_path / "go_on"
    job = isolated.introspect.options(headers={"trace": "abc"})
    handle = await job.enqueue_async(str(started), str(go_on))
    async with serving(heartbeat=0.02):
        pid = await is_written(started)

        async def is_seen() -> bool:
            return bool(await handle.progress_async() == {"at": 1})

        await eventually(is_seen)
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        go_on.touch()
        # Id, fence and attempt; headers; whether there is a deadline, and whether it should stop.
        expected = ((handle.id, 1, 1), {"trace": "abc"}, True, False)
        assert await handle.result_async(PATIENCE) == expected


async def test_stop_requests_travel_both_ways(harbor: Harbor, tmp_path: Path) -> None:
    jobs: list[Job] = []

    async def layer(job: Job, call_next: Any) -> Any:
        jobs.append(job)
        return await call_next(job)

    harbor.middleware.append(layer)
    upward = await isolated.stops_itself.enqueue_async()
    downward = await isolated.waits_for_stop.enqueue_async(str(tmp_path / "started"))
    async with serving():
        assert await upward.result_async(PATIENCE) is True
        assert jobs[0].stop_reason == "enough"
        await is_written(tmp_path / "started")
        jobs[1].stop("by the middleware")
        assert await downward.result_async(PATIENCE) == (True, "by the middleware")


async def test_a_late_stop_request_does_not_reach_the_next_job(harbor: Harbor, tmp_path: Path) -> None:
    next_began = asyncio.Event()

    async def layer(job: Job, call_next: Any) -> Any:
        result = await call_next(job)
        if job.type == "who":
            await next_began.wait()
            job.stop("too late")
        return result

    harbor.middleware.append(layer)
    async with serving(concurrency=2) as worker:
        first = await isolated.who.enqueue_async()
        await eventually(lambda: worker._processes is not None and bool(worker._processes._idle))
        second = await isolated.introspect.enqueue_async(str(tmp_path / "started"), str(tmp_path / "go"))
        pid = await is_written(tmp_path / "started")
        next_began.set()
        assert (await first.result_async(PATIENCE))[0] == pid
        (tmp_path / "go").touch()
        *_, should_stop = await second.result_async(PATIENCE)
        assert not should_stop


def test_output_and_logs_come_through(capfd: pytest.CaptureFixture[str]) -> None:
    with logged("worker.isolated") as told:
        isolated.print_and_log.enqueue()
        drain()
    printed = capfd.readouterr()
    assert "printed in a process" in printed.out
    assert "complained in a process" in printed.err
    assert told.messages == ["logged in a process", "went wrong"]
    assert told.buffer[0].colour == "blue"  # type: ignore[attr-defined]
    assert told.buffer[0].funcName == "print_and_log"
    assert "ValueError: with a traceback" in str(told.buffer[1].exc_text)


# -- the end of a process -------------------------------------------------------------------------------------------


def test_a_timeout_kills_and_counts_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a job with a timeout shorter than that could never be done: every timeout ends the process it waited for."""
    monkeypatch.setenv("TASKHARBOR_TEST_SLOW_IMPORT", "1")
    spinning = isolated.spin.options(timeout=0.3).enqueue(str(tmp_path / "started"))
    quick, after = isolated.quick_when_begun.enqueue(), isolated.who.enqueue()
    drain()
    record, error = spinning.record(), "JobTimeout: took longer than its timeout of 0.3 s"
    assert (record.state, record.attempts, record.last_error) == (JobState.DEAD, 1, error)
    killed = int((tmp_path / "started").read_text())
    assert not is_alive(killed)
    assert after.result(PATIENCE)[0] != killed
    assert quick.result(PATIENCE) > 0


async def test_a_cancel_kills_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before: its next execution could begin beside it. Here the kill is slow to take effect."""
    kill = WorkerProcess.kill

    def kill_late(process: WorkerProcess) -> None:
        process._loop.call_later(0.3, kill, process)

    handle = await isolated.with_a_child.enqueue_async(str(tmp_path / "started"))
    async with serving(heartbeat=0.02) as worker:
        grandchild = await is_written(tmp_path / "started")
        (process,) = present(worker._processes)._processes
        pid = present(present(process._process).pid)
        assert is_alive(grandchild)
        monkeypatch.setattr(WorkerProcess, "kill", kill_late)
        await handle.cancel_async()
        assert (await handle.wait_async(PATIENCE)).state is JobState.CANCELLED
        assert not is_alive(pid)
        await eventually(lambda: not is_alive(grandchild))


@pytest.mark.parametrize("name", ["tidy", "spin"])
async def test_a_shutdown_lets_a_handler_clean_up_and_kills_a_busy_one(name: str, tmp_path: Path) -> None:
    started, tidied = tmp_path / "started", tmp_path / "tidied"
    arguments = {"started": str(started)} | ({"tidied": str(tidied)} if name == "tidy" else {})
    handle = await isolated.harbor.enqueue_async(name, arguments)
    async with serving(grace=0.0) as worker:
        pid = await is_written(started)
        worker.stop()
        await eventually(lambda: not worker.snapshot()["running"])
        assert not is_alive(pid)
    record = await handle.record_async()
    assert (record.state, record.attempts, record.stalls) == (JobState.READY, 0, 0)
    assert name == "spin" or tidied.read_text() == "shutdown"


def test_a_process_that_dies_fails_its_job_which_is_retried(tmp_path: Path) -> None:
    """It is known to be dead though a fork of it keeps its connection open."""
    handle = isolated.die.enqueue(str(tmp_path / "died"))
    forking = isolated.die_after_a_fork.enqueue(str(tmp_path / "forked"))
    try:
        drain()
        assert last_error(forking).startswith("WorkerProcessDied")
    finally:
        os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)
    assert handle.result(PATIENCE) == "survived"
    attempts = isolated.harbor.client.job_attempts(handle.id)
    assert [attempt.outcome for attempt in attempts] == [Outcome.RETRIED, Outcome.DONE]
    assert attempts[0].error_type == "WorkerProcessDied"
    assert "SIGSEGV" in str(attempts[0].error_message)


def test_neither_a_fork_nor_a_closed_connection_answers_for_another_job() -> None:
    """A fork has a copy of the connection. What it answered was taken for the end of the next job."""
    forked = [isolated.fork_and_return.enqueue(how) for how in ("returns", "raises")]
    closed = isolated.close_connection.enqueue()
    after = [isolated.add.enqueue(n) for n in range(3)]
    drain()
    assert [one.result() for one in forked] == ["parent", "parent"]
    assert last_error(closed).startswith("WorkerProcessDied")
    assert [one.result() for one in after] == [1, 2, 3]


@pytest.mark.parametrize("when", ["idle", "with the job on its way"])
async def test_a_process_that_dies_before_its_job_has_begun_costs_the_job_nothing(when: str) -> None:
    async with serving() as worker:
        pid, *_ = await (await isolated.who.enqueue_async()).result_async(PATIENCE)
        # A process that is stopped cannot read the job.
        os.kill(pid, signal.SIGKILL if when == "idle" else signal.SIGSTOP)
        handle = await isolated.who.enqueue_async()
        if when != "idle":
            (process,) = present(worker._processes)._processes
            await eventually(lambda: not process.has_answered)
            os.kill(pid, signal.SIGKILL)
        assert (await handle.result_async(PATIENCE))[0] != pid
        record = await handle.record_async()
        assert (record.attempts, record.fence) == (0, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_of_the_database_is_open_in_a_process(harbor: Harbor, tmp_path: Path) -> None:
    harbor.use(f"sqlite:///{tmp_path}/jobs.db")
    handle = isolated.open_files.enqueue()
    drain()
    assert (files := handle.result(PATIENCE))
    assert not [file for file in files if str(tmp_path) in file]
    harbor.close()


async def test_two_at_once_have_two_processes_and_both_end_with_the_worker(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        await isolated.introspect.enqueue_async(str(path), str(tmp_path / "go_on"))
    async with serving(concurrency=2):
        pids = [await is_written(path) for path in paths]
        assert len(set(pids)) == 2
        (tmp_path / "go_on").touch()
    assert [pid for pid in pids if is_alive(pid)] == []
    await eventually(lambda: not any("process-keeper" in thread.name for thread in threading.enumerate()))


# -- finding handlers -----------------------------------------------------------------------------------------------


def test_what_a_process_could_not_find_is_refused_before_work_begins() -> None:
    handlers: list[Callable[..., Any]] = [isolated.Rot13().encode, isolated.harbor.job]
    for handler in handlers:
        worker = Worker("memory://", until_empty=True)
        worker.register("work", handler, isolation="process")
        with pytest.raises(InvalidRequest, match="plain function of its module"):
            worker.run()
    with pytest.raises(InvalidRequest, match="top of a module"):
        Worker("memory://").register("work", lambda job: None, isolation="process")


APP = """
import os, sys, time
from pathlib import Path
from taskharbor import Harbor

harbor = Harbor(sys.argv[1] if len(sys.argv) > 1 else "memory://")

@harbor.job(isolation="process")
def add(a: int, b: int) -> int:
    return a + b

@harbor.job(isolation="process")
def stay(how: str) -> None:
    Path(how).write_text(str(os.getpid()))
    if how == "asleep":
        time.sleep(3600)
    while how == "busy":
        pass
    sum(range(10**15))  # Keeps the interpreter to itself.
"""
GUARD = 'if __name__ == "__main__": '


@pytest.fixture
def run_app(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    def run(end: str, *command: str) -> subprocess.Popen[str]:
        (tmp_path / "my_app.py").write_text(APP + end)
        line = [sys.executable, *(command or ("my_app.py",))]
        return subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return run


@pytest.mark.parametrize("command", [["my_app.py"], ["-m", "my_app"]], ids=["script", "module"])
def test_handlers_of_the_main_module(command: list[str], run_app: Callable[..., Any]) -> None:
    sums = "handle = add.enqueue(2, 3); harbor.worker(until_empty=True).run(); print(handle.result(30))"
    process = run_app(GUARD + sums, *command)
    said, complained = process.communicate(timeout=PATIENCE * 4)
    assert (said.strip(), process.returncode) == ("5", 0), complained


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_processes_die_with_a_killed_worker(run_app: Callable[..., Any], tmp_path: Path) -> None:
    names = ("busy", "asleep", "in C")
    worker = run_app(f"{GUARD}stay.enqueue_many([(name,) for name in {names}]); harbor.worker().run()")
    try:
        pids = [await is_written(tmp_path / name) for name in names]
    finally:
        worker.kill()
        worker.communicate(timeout=PATIENCE)
    await eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize("command", [["my_app.py"], ["-c", "import my_app"]], ids=["script", "module"])
def test_a_script_does_not_enqueue_again_in_a_process(
    command: list[str], run_app: Callable[..., Any], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    # A bound, lest each process starts another.
    bound = "assert 'NESTED' not in os.environ; os.environ['NESTED'] = 'yes'"
    unguarded = f"add.enqueue(1, 2); {bound}; harbor.worker(until_empty=True).run()"
    _, complained = run_app(unguarded, *command, url).communicate(timeout=PATIENCE * 4)
    assert 'under `if __name__ == "__main__":`' in complained
    with Client(url) as client:
        assert len(client.list_jobs().jobs) == 1


def test_a_process_enqueues_into_the_store_that_its_worker_uses(harbor: Harbor, tmp_path: Path) -> None:
    harbor.use(f"sqlite:///{tmp_path}/other.db")
    isolated.enqueue_another.enqueue(1)
    drain()
    assert len(harbor.client.list_jobs().jobs) == 2
    harbor.close()


def test_a_process_enters_the_lifespan_of_its_app_once_and_leaves_it_at_the_end(
    harbor: Harbor, tmp_path: Path
) -> None:
    handles = [isolated.resource.enqueue(str(tmp_path / "left")) for _ in range(2)]
    other = isolated.resource_async.enqueue()
    harbor.worker(until_empty=True, concurrency=1).run()
    pids = {*handles[0].result(PATIENCE), *handles[1].result(PATIENCE), *other.result(PATIENCE)}
    assert len(pids) == 1
    assert (tmp_path / "left").read_text() == str(pids.pop())
