"""What is built once and used by every server after it: freshly initialised data directories, reachable installations.

Test processes run side by side and are killed at any point, so everything is built in a private directory and appears
under its name by one rename. Whoever loses that race throws his away.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

from taskharbor_testkit.servers.account import private_directory, room, server_account

_STALE = 2 * 24 * 3600.0


def initialised_data(binaries: Path) -> Path:
    """A data directory as initdb leaves it, to be copied and not used."""

    def build(target: Path) -> None:
        choices = (
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
        )
        server_account().run(binaries / "initdb", "-D", target, *choices, cwd=target.parent)

    return _built_once("data", binaries / "postgres", build)


def reachable(binaries: Path) -> Path:
    """The directory itself, or that of a copy where the account that servers run as cannot reach it."""
    if server_account().can_run(binaries / "initdb"):
        return binaries
    installation = binaries.parent
    package = installation.parent

    def build(target: Path) -> None:
        skipped = shutil.ignore_patterns("include", "*.a")
        shutil.copytree(
            installation, target / package.name / installation.name, symlinks=True, ignore=skipped
        )
        # Wheels keep the libraries they bring next to the package, and programs find them by the relative path.
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, target / libraries.name)
        # An installation that only its owner may enter holds files that only he may read.
        for path in (target, *target.rglob("*")):
            if not path.is_symlink():
                server_account().own(path)

    copy = _built_once("install", binaries / "postgres", build)
    return copy / package.name / installation.name / binaries.name


def reachable_program(program: Path) -> Path:
    """A program that needs nothing beside it: itself, or a copy where the account that servers run as cannot reach it."""
    if server_account().can_run(program):
        return program

    def build(target: Path) -> None:
        target.mkdir()
        shutil.copy(program, target / program.name)
        for path in (target, target / program.name):
            server_account().own(path)

    return _built_once("program", program, build) / program.name


def _built_once(kind: str, program: Path, build: Callable[[Path], None]) -> Path:
    facts = program.stat()
    identity = f"{program.resolve()} {facts.st_size} {facts.st_mtime_ns} {server_account().effective_uid}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    # Cleaners of temporary directories take old files out one by one: nothing is used for longer than a day.
    today = int(time.time() // (24 * 3600))
    shelf = _shelf()
    finished = shelf / f"{kind}-{digest}-{today}"
    if finished.is_dir():
        return finished
    workshop = private_directory("building-", inside=shelf)
    try:
        build(workshop / kind)
        try:
            (workshop / kind).rename(finished)
        except OSError:
            if not finished.is_dir():
                raise
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    _remove_stale(shelf)
    return finished


def _shelf() -> Path:
    """Ours alone, or else anyone with an account on this machine could plant a server for us to run."""
    shelf = room() / f"taskharbor-servers-{os.geteuid()}"
    try:
        shelf.mkdir()
    except FileExistsError:
        facts = shelf.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise RuntimeError(f"{shelf} does not belong to us: remove it") from None
    shelf.chmod(0o755)
    return shelf


def _remove_stale(shelf: Path) -> None:
    for entry in shelf.iterdir():
        try:
            old = time.time() - entry.lstat().st_mtime > _STALE
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(entry, ignore_errors=True)
