"""Every contender in an environment of its own under a cache directory: their requirements need not agree, nor meet ours.

The pinned versions are those that were measured. An environment is made once and found again by what is in it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.contender import Contender

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DEFAULT_CACHE = Path("~/.cache/taskharbor-bench")

_READY = "ready"


class CannotInstall(Exception):
    """Says why, in the words of pip or npm."""


@dataclass(frozen=True)
class Launcher:
    """How to start a contender's program: a URL, a command and its argument are still to be added."""

    command: tuple[str, ...]
    environment: dict[str, str]


def install(contender: Contender, cache: Path) -> Launcher:
    """Makes the contender's environment where it is missing."""
    wanted = contender.python or contender.node
    tag = hashlib.sha256("\n".join((sys.version, *wanted)).encode()).hexdigest()[:12]
    folder = cache.expanduser() / f"{contender.program}-{tag}"
    if contender.node:
        _once(folder, [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *wanted]])
        program = str(HERE / f"{contender.program}.cjs")
        return Launcher(("node", program), {"NODE_PATH": str(folder / "node_modules")})
    python = sys.executable
    if contender.python:
        python = str(folder / "bin" / "python")
        _once(
            folder,
            [
                [sys.executable, "-m", "venv", str(folder)],
                [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted],
            ],
        )
    return Launcher((python, "-m", "benchmarks.peers", contender.program), {})


def _once(folder: Path, commands: list[list[str]]) -> None:
    if (folder / _READY).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotInstall(f"{command[0]}: {error}") from error
        if done.returncode:
            said = [line[:120] for line in done.stderr.splitlines() if "error" in line.lower()]
            raise CannotInstall("; ".join(said[-4:]) or f"{os.path.basename(command[0])} failed")
    (folder / _READY).touch()
