"""Whom servers run as.

PostgreSQL and PgBouncer refuse to run as root, which is what containers run tests as. There they run as `postgres` or
`nobody`, who must be able to enter the directories that they are given.
"""

from __future__ import annotations

import functools
import os
import pwd
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_SURROUNDINGS = ("PG", "LC_", "LANG")


@dataclass(frozen=True)
class Account:
    uid: int | None
    """None: our own, and so for the group."""
    gid: int | None

    @property
    def effective_uid(self) -> int:
        return os.geteuid() if self.uid is None else self.uid

    def spawn(
        self, command: Sequence[str | Path], *, cwd: Path, output: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        """Out of reach of the terminal's Ctrl-C: the tests that are being interrupted still tidy up."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment(),
            start_new_session=True,
            user=self.uid,
            group=self.gid,
            extra_groups=None if self.uid is None else [],
        )

    def run(self, program: str | Path, *arguments: str | Path, cwd: Path) -> None:
        with self.spawn([program, *arguments], cwd=cwd, output=subprocess.PIPE) as process:
            output, _ = process.communicate()
        if process.returncode != 0:
            text = output.decode(errors="replace").strip()
            raise RuntimeError(f"{program} ended with {process.returncode}: {text}")

    def can_run(self, program: Path) -> bool:
        """Whether the program, its libraries and every directory above them are open to the account."""
        try:
            self.run(program, "--version", cwd=Path("/"))
        except (OSError, RuntimeError):
            return False
        return True

    def own(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def environment() -> dict[str, str]:
    """Ours, without what would steer a server: PGDATA, PGPORT, the locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SURROUNDINGS)}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


@functools.cache
def server_account() -> Account:
    if os.geteuid() != 0:
        return Account(None, None)
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise RuntimeError(
        "servers refuse to run as root, and there is neither a user postgres nor nobody to run them as"
    )


def room() -> Path:
    """A directory for temporary files that the account may enter."""
    given = Path(tempfile.gettempdir()).resolve()
    if server_account().uid is None:
        return given
    for candidate in (given, Path("/tmp"), Path("/var/tmp")):
        if all(directory.stat().st_mode & 0o001 for directory in (candidate, *candidate.parents)):
            return candidate
    raise RuntimeError(
        f"{given} is closed to the user that servers run as: point TMPDIR to an open directory"
    )


def private_directory(prefix: str, *, inside: Path | None = None) -> Path:
    """A new directory that only the account may enter."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=inside or room()))
    server_account().own(directory)
    return directory
