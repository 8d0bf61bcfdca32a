"""Files under what files suffer: processes that write at once, and processes that are killed in the middle."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from drivers.objectstore.marks import add, all_marks, marks_object
from taskharbor.drivers.objectstore import local_files
from taskharbor.drivers.objectstore.blobs import Blob, Data, Version
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.errors import BackendUnavailable, InvalidRequest

PROGRAM = Path(__file__).with_name("writing_processes.py")


def processes(story: str, folder: Path, *numbers: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, PROGRAM, story, folder, *map(str, numbers)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("count", "victims", "increments"),
    [(6, 0, 15), (6, 4, 15), pytest.param(12, 9, 100, marks=pytest.mark.slow)],
)
def test_confirmed_writes_survive_kills(tmp_path: Path, count: int, victims: int, increments: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    found = processes("many", tmp_path, count, victims, increments, seed)
    assert found["codes"] == [0] * (count - victims)
    confirmed = found["confirmed"]
    assert len(confirmed) == len(set(confirmed)) >= (count - victims) * increments
    # A victim may have died between its last write and the word of it.
    assert max(confirmed) <= found["number"] <= len(confirmed) + victims


def test_a_writer_killed_at_any_step_leaves_the_old_content_or_the_new_one(tmp_path: Path) -> None:
    found = processes("kill_points", tmp_path)
    assert found["points"] > 5, found
    assert found["steps"][-1] == 1, found
    # Dead before the rename, nothing has changed; dead after it, all has.
    assert 0 in found["steps"]
    assert 1 in found["steps"][:-1]


async def test_a_reader_makes_nothing(tmp_path: Path) -> None:
    blobs = LocalFiles(tmp_path / "store")
    assert await blobs.read("a") is None
    assert await blobs.names("") == []
    await blobs.close()
    assert not (tmp_path / "store").exists()


async def test_what_killed_writers_left_behind_is_swept_away_in_time(tmp_path: Path) -> None:
    async def write() -> None:
        blobs = LocalFiles(tmp_path)
        await blobs.put("a", b"x")
        await blobs.close()

    await write()
    unfinished = tmp_path / ".taskharbor" / "unfinished"
    assert list(unfinished.iterdir()) == []
    old, young = unfinished / "old", unfinished / "young"
    for file in (old, young):
        file.write_bytes(b"")
    long_ago = time.time() - 4000
    os.utime(old, (long_ago, long_ago))
    await write()
    assert list(unfinished.iterdir()) == [young]


async def test_a_lock_never_given_back_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "_LOCK_WITHIN", 0.05)

    blobs = LocalFiles(tmp_path)
    version = await blobs.write("a", b"x", None)
    (lock,) = (tmp_path / ".taskharbor" / "locks").iterdir()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BackendUnavailable, match="is it stopped"):
            await blobs.write("a", b"y", version)
        assert await blobs.read("a") == Blob(b"x", version), "reading needs no lock"
    await blobs.write("a", b"y", version)
    await blobs.close()


async def test_a_store_removed_under_an_open_handle_is_made_again(tmp_path: Path) -> None:
    blobs = LocalFiles(tmp_path / "store")
    await blobs.write("a/b", b"x", None)
    shutil.rmtree(tmp_path / "store")
    assert await blobs.read("a/b") is None
    await blobs.write("a/b", b"y", None)
    await blobs.close()


async def test_files_of_others_and_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    blobs = LocalFiles(tmp_path)
    (tmp_path / "a").write_bytes(b"a letter")
    with pytest.raises(BackendUnavailable, match="was not written by TaskHarbor"):
        await blobs.read("a")
    for name in ("../a", "a/../b", ".hidden", "/etc/passwd", "", "a//b"):
        with pytest.raises(InvalidRequest, match="not a name"):
            await blobs.put(name, b"")
    await blobs.close()


async def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    blobs = LocalFiles(tmp_path / "file" / "store")
    with pytest.raises(BackendUnavailable, match="rights to write"):
        await blobs.write("a", b"", None)
    await blobs.close()


async def test_a_write_that_a_folder_refused_is_made_again_however_many_followed(tmp_path: Path) -> None:
    """A folder gets every write once, so its refusal is certain: nothing of the write has landed, whatever the object forgot."""

    class Crowded(LocalFiles):
        others = 70

        async def write(self, name: str, data: Data, known: Version | None) -> Version:
            others, self.others = self.others, 0
            crowd = marks_object(LocalFiles(tmp_path, sync=False))
            for number in range(others):
                await crowd.change(add(f"other {number}"))
            return await super().write(name, data, known)

    assert await marks_object(Crowded(tmp_path, sync=False)).change(add("mark")) == 70
    marks = await marks_object(LocalFiles(tmp_path)).look(all_marks)
    assert (len(marks), marks.count("mark")) == (71, 1)
