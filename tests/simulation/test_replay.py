"""A seed is the whole story: run again, in another process with other hashes, it gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pkgutil import resolve_name
from typing import Any

import pytest

from taskharbor_testkit.simulation import simulate
from taskharbor_testkit.simulation.__main__ import main

SAMPLE = range(0, 200, 20)


def test_a_seed_gives_the_same_trace_twice_and_in_another_process() -> None:
    reports = [simulate(seed) for seed in SAMPLE]
    assert [report.trace for report in reports[:3]] == [simulate(seed).trace for seed in SAMPLE[:3]]
    digests = [report.digest for report in reports]
    assert len(set(digests)) == len(SAMPLE)
    program = (
        "from taskharbor_testkit.simulation import simulate\n"
        f"for seed in {list(SAMPLE)}: print(simulate(seed).digest)"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "4242"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.split() == digests


def test_nothing_real_is_asked_for_time_or_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.current_thread()

    def forbid(name: str) -> None:
        real = resolve_name(name)

        def forbidden(*args: Any, **options: Any) -> Any:
            # Other threads (a library's, from tests before this one) may go on as they like.
            if threading.current_thread() is here:
                raise AssertionError("a simulation must not depend on anything outside it")
            return real(*args, **options)

        monkeypatch.setattr(name, forbidden)

    for name in ("time.time", "time.time_ns", "time.monotonic", "time.monotonic_ns", "time.sleep"):
        forbid(name)
    for name in ("os.urandom", "secrets.token_hex", "threading.Thread.start", "socket.socket.__init__"):
        forbid(name)
    reports = [simulate(seed) for seed in range(5)]
    monkeypatch.undo()
    assert [str(report) for report in reports if not report.is_ok] == []


def test_the_command_runs_seeds_shows_one_and_says_which_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3"]) == 0
    assert "3 seeds, 0 failed" in capsys.readouterr().out
    assert main(["--seed", "5", "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "heals" in shown
    assert simulate(5).digest in shown
    assert main(["--seed", "1", "--bug", "no W"]) == 1
    shown = capsys.readouterr().out
    assert "wNeverExceeded: W is 1" in shown
    assert "python -m taskharbor_testkit.simulation --seed 1 --bug 'no W' --trace" in shown
    with pytest.raises(SystemExit, match="2"):
        main(["--seeds", "0"])
    assert "--seeds: at least 1" in capsys.readouterr().err
