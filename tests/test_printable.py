"""Text from jobs, stores and other programs, as it is shown."""

from __future__ import annotations

import io
import json
import logging

import pytest

from taskharbor.printable import printable, printable_json
from taskharbor.worker.logs import JSONFormatter, TextFormatter, log_trace

ODD = "a\n12:00:00.000 info worker: FORGED\r\x1b[31m\x7f\x85\x9b\u2028\u2029\u202e\U000e0001"


def test_nothing_of_a_text_begins_a_line_or_steers_a_terminal() -> None:
    assert printable(ODD).isprintable()
    assert printable("a b é 日") == "a b é 日"
    assert printable("a\n\u2028b", "\n") == "a\n\\u2028b"
    text = printable_json({ODD: ODD})
    assert (text.isprintable(), json.loads(text)) == (True, {ODD: ODD})


@pytest.mark.parametrize("form", [TextFormatter(), JSONFormatter()])
def test_a_failed_job_s_line_and_traceback_imitate_no_line(form: logging.Formatter) -> None:
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(form)
    log = logging.getLogger("taskharbor.worker")
    log.addHandler(handler)
    try:
        log_trace(log, logging.ERROR, "%s is dead", ODD, trace=f"Traceback\n{ODD}")
    finally:
        log.removeHandler(handler)
    first, *others = stream.getvalue().split("\n")[:-1]
    assert "is dead" in first
    assert all(line.startswith("  ") for line in others)
    assert all(line.isprintable() for line in (first, *others))
