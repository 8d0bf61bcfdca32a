"""The types a user's editor sees: mypy itself is the judge, with unused ignores as errors."""

import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).parent / "typing" / "declared_jobs.py"


def test_types_survive_the_decorator() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(SAMPLE)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
