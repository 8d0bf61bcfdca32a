"""The types a user's editor sees: mypy itself is the judge, with unused ignores as errors."""

import subprocess
import sys
from pathlib import Path

SAMPLES = sorted((Path(__file__).parent / "typing").glob("*.py"))


def test_types_survive_the_decorator_and_tell_synchronous_from_asynchronous() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", *map(str, SAMPLES)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
