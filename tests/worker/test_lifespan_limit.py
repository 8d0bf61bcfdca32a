"""A lifespan that hangs keeps no process alive that was asked to stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("hanging_lifespan.py")


def start(place: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(PROGRAM), place, json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process


@pytest.mark.parametrize("place", ["start", "sync start", "end", "sync end"])
@pytest.mark.parametrize(
    ("options", "signals"),
    [
        pytest.param({"grace": 0.2}, 1, id="one signal"),
        pytest.param({}, 2, id="two signals"),
        pytest.param({"max_seconds": 0.2, "grace": 0.2}, 0, id="max_seconds"),
    ],
)
def test_a_lifespan_that_hangs_does_not_outlive_a_stop(
    place: str, options: dict[str, Any], signals: int
) -> None:
    if place.endswith("end") and signals:
        options = options | {"until_empty": True}  # So that it comes to its end.
    with start(place, **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        # Of two signals of one kind the second may be lost.
        for number in (signal.SIGTERM, signal.SIGINT)[:signals]:
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"the lifespan hangs at its {place.split()[-1]}: the process ends without it" in said
