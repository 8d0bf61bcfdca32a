"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cli.cli_harness import Run
from taskharbor.worker.logs import LogFormat, set_up_logs


def said(style: LogFormat, level: str = "info", **extra: object) -> str:
    stream = io.StringIO()
    set_up_logs(level, style, stream)
    log = logging.getLogger("taskharbor.worker")
    log.debug("too quiet")
    log.warning("job %s failed", "j1", extra=extra)
    return stream.getvalue()


def test_text_lines_levels_and_repeated_set_up() -> None:
    (line,) = said("text").splitlines()
    assert line.endswith("warning worker: job j1 failed")
    assert len(said("text", "debug").splitlines()) == 2
    assert said("text", "error") == ""


def test_json_lines_carry_known_fields_only() -> None:
    known = {"job_id": "j1", "queue": "mail", "outcome": "dead"}
    (line,) = said("json", **known, payload={"secret": 1}, args_given="secret").splitlines()
    document = json.loads(line)
    expected = {**known, "message": "job j1 failed", "level": "warning", "logger": "taskharbor.worker"}
    assert expected.items() <= document.items()
    assert "secret" not in line


@pytest.mark.parametrize("style", ["text", "json"])
def test_an_exception_is_told(style: LogFormat) -> None:
    stream = io.StringIO()
    set_up_logs("info", style, stream)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("taskharbor").exception("it broke")
    text = stream.getvalue()
    assert "ValueError: boom" in text
    assert style == "text" or json.loads(text)["error_type"] == "ValueError"


APP = """
import logging, threading, warnings
from taskharbor import Harbor

harbor = Harbor("sqlite:///logs.db", max_attempts=2, backoff=(60, 60))
log = logging.getLogger("shop.mail")

def speak(name):
    log.info("%s speaks", name, extra={"payload": "secret"})
    warnings.simplefilter("always")
    warnings.warn(f"{name} is old")
    thread = threading.Thread(target=lambda: 1 / 0, name=name)
    thread.start()
    thread.join()
    raise ValueError(f"{name} failed\\x1b[31m\\nwith more")

@harbor.job
async def on_loop(secret: str) -> None:
    speak("on_loop")

@harbor.job
def on_thread(secret: str) -> None:
    speak("on_thread")

@harbor.job(isolation="process")
def in_process(secret: str) -> None:
    speak("in_process")

@harbor.job(max_attempts=1)
async def good(secret: str) -> None: ...

@harbor.batch_job
async def batch(table: "pyarrow.Table") -> None:
    raise ValueError("all of them failed")
"""
KINDS = ("on_loop", "on_thread", "in_process")


@pytest.fixture
def work(run: Run, tmp_path: Path) -> Any:
    """The log of a worker with a job of each kind."""
    (tmp_path / "speaking.py").write_text(APP)

    def work(*args: str, types: tuple[str, ...] = KINDS) -> str:
        jobs = "".join(f'{{"type": "{type}", "payload": {{"secret": "secret"}}}}\n' for type in types)
        run("enqueue", "--app", "speaking", "--from", "-", input=jobs)
        return str(run("worker", "speaking", "--until-empty", *args).stderr)

    return work


def test_every_line_is_json_and_a_handlers_line_names_its_job(work: Any) -> None:
    text = work("--json", "--log-level", "debug", types=(*KINDS, "good"))
    told = [json.loads(line) for line in text.splitlines()]
    assert "secret" not in text
    for kind in KINDS:
        of_job = [one for one in told if one.get("job_type") == kind]
        assert len({one["job_id"] for one in of_job}) == 1
        assert {(one["queue"], one["attempt"]) for one in of_job} == {("default", 1)}
        begins, speaks, warns, raised, failed = of_job
        assert begins["message"].endswith("starts, attempt 1 of 2")
        assert (speaks["logger"], speaks["message"]) == ("shop.mail", f"{kind} speaks")
        assert (warns["logger"], f"{kind} is old" in warns["message"]) == ("py.warnings", True)
        assert ("raised ValueError after" in raised["message"], raised["seconds"] >= 0) == (True, True)
        assert (failed["level"], failed["error_type"]) == ("warning", "ValueError")
        assert failed["error_message"] == f"{kind} failed\x1b[31m\nwith more"
        assert failed["traceback"].startswith("Traceback")
        assert f"the thread {kind} failed" in [one["message"] for one in told]
    assert [one["message"].split()[2] for one in told if one.get("job_type") == "good"] == [
        "starts,",
        "returned",
    ]


def test_lines_for_people(work: Any) -> None:
    text = work(types=("on_thread",))
    assert "starts" not in text
    (line,) = [line for line in text.splitlines() if "speaks" in line]
    assert "info    shop.mail: on_thread speaks  [on_thread " in line
    assert line.endswith(" attempt 1]")
    assert "will be retried after attempt 1 of 2: ValueError: on_thread failed\\x1b[31m\n  Traceback" in text
    assert "\x1b" not in text
    short = work("--no-tracebacks", types=("on_thread",))
    assert "ValueError: on_thread failed" in short
    assert "Traceback" not in short


def test_rows_of_a_batch_that_fail_together_show_one_traceback(work: Any) -> None:
    pytest.importorskip("pyarrow")
    text = work("--log-level", "debug", types=("batch",) * 3)
    assert text.count("all of them failed\n  Traceback") == 1
    assert text.count("batch starts with 3 jobs") == text.count("batch ended with 3 jobs after") == 1
