"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging

import pytest

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
