"""Manifests: small numbered files, of which the newest says what is in the lake. Making one is how a run takes effect.

A manifest is written under another name, made durable, and then linked to its number. A number can be linked once, so of two
runs that started from the same state only one takes effect.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import msgspec

from taskharbor.errors import TaskHarborError

FOLDER = "_lake"
_NAME = re.compile(r"manifest-(\d{8})\.json")


class LakeChanged(TaskHarborError):
    """Another run took effect meanwhile. Nothing of this one did."""


class LakeUnreadable(TaskHarborError):
    """A manifest that this version cannot read."""


class Directory(msgspec.Struct, frozen=True):
    """One folder of Parquet files, relative to the lake, that holds rows of one table and one date."""

    path: str
    rows: int
    bytes: int
    files: int


class Manifest(msgspec.Struct, kw_only=True):
    number: int = 0
    made_by: str = ""
    """`run`, `compact` or `vacuum`."""
    made_at: str = ""
    run: int = 0
    """The number of runs so far, which is the number of the last one."""
    cursors: dict[str, str] = {}
    """The cursor up to which the log of each source was read."""
    objectives: str = ""
    """The objectives for which the table `gold.objectives` was made."""
    tables: dict[str, dict[str, list[Directory]]] = {}
    """Table, date, directories."""

    def directories(self) -> set[str]:
        return {
            directory.path
            for by_date in self.tables.values()
            for directories in by_date.values()
            for directory in directories
        }


def numbers(lake: Path) -> list[int]:
    """Return the numbers of the manifests, oldest first."""
    folder = lake / FOLDER
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(name) for name in os.listdir(folder))
    return sorted(int(match[1]) for match in found if match)


def newest(lake: Path) -> Manifest:
    """Return the newest manifest; an empty one with the number 0 if there is none."""
    there = numbers(lake)
    return load(lake, there[-1]) if there else Manifest()


def load(lake: Path, number: int) -> Manifest:
    path = path_of(lake, number)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as error:
        raise LakeUnreadable(
            f"{path} cannot be read ({error}): was it written by a newer version? Do not edit it; "
            "if it is damaged, restore it or start a new lake"
        ) from error


def commit(lake: Path, manifest: Manifest) -> None:
    """Make it the newest manifest. Raises LakeChanged if its number is taken."""
    folder = lake / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    target = path_of(lake, manifest.number)
    draft = folder / f"draft-{secrets.token_hex(8)}"
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, target)
    except FileExistsError:
        raise LakeChanged(
            f"another run on {lake} took effect meanwhile and nothing of this one did: run it again"
        ) from None
    finally:
        draft.unlink()
    # The name of a file is durable only once its folder is.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def path_of(lake: Path, number: int) -> Path:
    return lake / FOLDER / f"manifest-{number:08d}.json"
