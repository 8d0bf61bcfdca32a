"""A seed is the whole story: run again, in another process with other hashes, it gives the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pkgutil import resolve_name
from typing import Any

import pytest

from taskharbor_testkit.simulation import Report, simulate
from taskharbor_testkit.simulation.__main__ import main

SAMPLE = range(0, 200, 10)


def test_a_seed_gives_the_same_trace_twice() -> None:
    for seed in SAMPLE:
        assert simulate(seed).trace == simulate(seed).trace, f"seed {seed}"


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_a_seed_gives_the_same_trace_in_another_process(hash_seed: str) -> None:
    program = (
        "from taskharbor_testkit.simulation import simulate\n"
        f"for seed in {list(SAMPLE)}: print(simulate(seed).digest)"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )

    assert elsewhere.stdout.split() == [simulate(seed).digest for seed in SAMPLE]


def test_different_seeds_tell_different_stories() -> None:
    assert len({simulate(seed).digest for seed in range(20)}) == 20


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

    reports = [simulate(seed) for seed in range(10)]

    monkeypatch.undo()
    assert [str(report) for report in reports if not report.is_ok] == []


def test_a_failing_seed_says_how_to_replay_it() -> None:
    report = Report(seed=7, violations={"nothingLost": ["job j1 is in the store 0 times"]})

    assert "python -m taskharbor_testkit.simulation --seed 7 --trace" in str(report)
    assert "nothingLost: job j1 is in the store 0 times" in str(report)


def test_the_command_runs_seeds_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3"]) == 0
    assert "3 seeds, 0 failed" in capsys.readouterr().out

    assert main(["--seed", "5", "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "heals" in shown
    assert simulate(5).digest in shown


def test_the_command_fails_with_the_seed_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "1", "--bug", "no W"]) == 1

    shown = capsys.readouterr().out
    assert "wNeverExceeded: W is 1" in shown
    assert "--seed 1 --bug 'no W' --trace" in shown


def test_a_run_of_no_seeds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--seeds", "0"])
    assert "--seeds: at least 1" in capsys.readouterr().err
