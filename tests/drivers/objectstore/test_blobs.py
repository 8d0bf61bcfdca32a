"""The promises of a store, on every kind: files, memory, and S3 over real HTTP. The probe, and the store's time. And files among
processes that write at once, some of which are killed in the middle."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drivers.objectstore.fake_blobs import FAULTS, Fault, FaultyBlobs, HeldBlobs, Weather
from drivers.objectstore.marks import add, all_marks, marks_object
from needing import Entered
from records import present
from taskharbor.clock import FakeClock
from taskharbor.drivers.objectstore import blobs as store
from taskharbor.drivers.objectstore import local_files
from taskharbor.drivers.objectstore.blobs import Blob, Blobs, Conflict, Data, Unclear, Version, probe
from taskharbor.drivers.objectstore.local_files import LocalFiles
from taskharbor.drivers.objectstore.options import parse_url
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor.jobs import SECOND, Micros
from taskharbor_testkit.servers.s3 import S3Server, fresh_s3_url


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Blobs]:
    blobs = parse_url(url).open()
    try:
        yield blobs
    finally:
        await blobs.close()


@pytest.fixture(params=["file", "mem", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return fresh_s3_url()
    return f"file://{tmp_path}/store" if request.param == "file" else f"mem://{secrets.token_hex(6)}"


@pytest.fixture
def blobs(url: str) -> Entered:
    return Entered(opened(url))


async def test_a_write_succeeds_only_on_the_known_version(blobs: Blobs) -> None:
    assert await blobs.read("a/b") is None
    first = await blobs.write("a/b", b"one", None)
    assert await blobs.read("a/b") == Blob(b"one", first)
    with pytest.raises(Conflict):
        await blobs.write("a/b", b"over", None)
    second = await blobs.write("a/b", b"two", first)
    assert second != first
    with pytest.raises(Conflict):
        await blobs.write("a/b", b"stale", first)
    assert await blobs.read("a/b", first) == await blobs.read("a/b") == Blob(b"two", second)
    assert await blobs.read("a/b", second) is None
    await blobs.delete(["a/b"])
    with pytest.raises(Conflict):
        await blobs.write("a/b", b"gone", second)
    assert await blobs.read("a/b") is await blobs.read("a/b", second) is None


@pytest.mark.parametrize("url", ["file", "mem"], indirect=True)
async def test_an_object_that_was_removed_and_made_again_is_not_taken_for_the_old_one(blobs: Blobs) -> None:
    # S3 tells versions by content, and every content of a compare-and-swap object has an id of its own.
    old = await blobs.write("a", b"same", None)
    await blobs.delete(["a"])
    await blobs.write("a", b"same", None)
    with pytest.raises(Conflict):
        await blobs.write("a", b"other", old)


async def test_names_are_listed_by_folder_and_in_order(blobs: Blobs) -> None:
    names = ["log/b", "log/a", "log/deep/c", "logs/x", "state", "q=41=2e/0/state"]
    for name in names:
        await blobs.put(name, name.encode())
    assert await blobs.names("log") == ["log/a", "log/b", "log/deep/c"]
    assert await blobs.names("") == sorted(names)
    assert await blobs.names("nothing/here") == []
    await blobs.delete(["log/a", "log/b", "never/was"])
    assert await blobs.names("log") == ["log/deep/c"]
    await blobs.delete([])
    await blobs.put("log/deep/c", b"again")
    assert present(await blobs.read("log/deep/c")).data == b"again"


async def test_objects_may_be_empty_or_large(blobs: Blobs) -> None:
    large = secrets.token_bytes(6 * 1024 * 1024)
    version = await blobs.write("a", b"", None)
    assert await blobs.read("a") == Blob(b"", version)
    version = await blobs.write("a", large, version)
    assert await blobs.read("a") == Blob(large, version)
    await blobs.put("b", large)
    assert present(await blobs.read("b")).data == large


async def test_of_many_who_create_or_replace_at_once_one_succeeds(url: str) -> None:
    version: Version | None = None
    handles = [parse_url(url).open() for _ in range(8)]
    for turn in range(4):
        writes = [one.write("a", f"{turn} {n}".encode(), version) for n, one in enumerate(handles)]
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(answer, Version | Conflict) for answer in answers)
        (version,) = [answer for answer in answers if isinstance(answer, Version)]
    for one in handles:
        await one.close()


def test_versions_are_compared_as_their_store_compares_them() -> None:
    assert Version("a") == Version("a")
    assert Version("a") != Version("b")
    assert Version('"a"', "7") == Version("a", "7"), "numbers count where there are some"
    assert Version("a", "7") != Version("a", "8")
    assert Version("a", "7") == Version("a")
    assert Version("a") != "a"


# -- the probe --------------------------------------------------------------------------------------------


LIES = [
    "created an object that was there already",
    "replaced a version that was not there any more",
    "refused to replace the very version",
    "did not show what it had last confirmed",
    "gave two contents the same version",
]


class Liar(HeldBlobs):
    """Breaks one of the promises."""

    def __init__(self, lie: str) -> None:
        super().__init__()
        self.lie = LIES.index(lie)

    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        if self.lie == 0 and known is None:
            await self.delete([name])
        if self.lie == 1 and known is not None:
            known = self.objects[name].version
        if self.lie == 2 and known is not None:
            raise Conflict
        return await super().write(name, data, known)

    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        blob = await super().read(name, unless, size)
        return Blob(b"first", blob.version) if blob is not None and self.lie == 3 else blob

    def keep(self, name: str, data: bytes) -> Version:
        version = Version("always") if self.lie == 4 else super().keep(name, data)
        self.objects[name] = Blob(data, version)
        return version


@pytest.mark.parametrize("lie", LIES)
async def test_a_store_that_lies_is_refused(lie: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{lie}.* Use a store with conditional writes"):
        await probe(Liar(lie))


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_honest_store_in_bad_weather_is_not_taken_for_a_liar(fault: Fault) -> None:
    weather = Weather()
    for before in range(4):
        held = HeldBlobs()
        weather.next_write(*[None] * before, fault)
        await probe(FaultyBlobs(held, weather))
        weather.clear_up()
        assert held.objects == {}


# -- S3 over HTTP -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_with_faults() -> Iterator[S3Server]:
    with S3Server.start() as server:
        yield server


@pytest.fixture
def s3(s3_with_faults: S3Server) -> S3Server:
    """Without what an earlier test planned: some plan more faults than they come to see."""
    s3_with_faults.plan()
    return s3_with_faults


@pytest.mark.parametrize(
    ("fault", "kind", "lands"),
    [
        *((f"{fault}_after", Unclear, True) for fault in ("cut", "error_500", "silent")),
        *((f"{fault}_before", Unclear, False) for fault in ("cut", "error_500", "error_503", "silent")),
        ("conflict_409", Conflict, False),
        ("refused_after", Conflict, True),
    ],
)
async def test_a_lost_answer_is_unclear(s3: S3Server, fault: str, kind: type[Exception], lands: bool) -> None:
    async with opened(s3.fresh_url(timeout="0.5")) as blobs:
        version = await blobs.write("a", b"old", None)
        s3.plan(fault)
        with pytest.raises(kind) as raised:
            await blobs.write("a", b"new", version)
        assert "test" not in str(raised.value), "no key, no secret"
        assert present(await blobs.read("a")).data == (b"new" if lands else b"old")

        cas = marks_object(blobs)
        s3.plan(fault)
        assert await cas.change(add("first")) == 0
        s3.plan(fault, fault)
        assert await cas.change(add("second")) == 1
        assert await marks_object(blobs).look(all_marks) == ["first", "second"]


async def test_a_store_that_stands_still_is_reported_and_works_again_afterwards(s3: S3Server) -> None:
    async with opened(s3.fresh_url(timeout="0.2")) as blobs:
        cas = marks_object(blobs)
        await cas.change(add("before"))
        s3.pause()
        try:
            with pytest.raises(BackendUnavailable, match="can it be reached"):
                await cas.look(all_marks)
        finally:
            s3.resume()
        assert await cas.change(add("after")) == 1


async def test_who_is_not_let_in_is_told_so_without_the_keys_and_a_missing_bucket_is_named(
    s3: S3Server,
) -> None:
    async with opened(s3.fresh_url(secret_access_key="hidden")) as blobs:
        s3.plan("forbidden_403")
        with pytest.raises(InvalidRequest, match="check the credentials") as refusal:
            await blobs.write("a", b"", None)
        assert "hidden" not in str(refusal.value)
    async with opened(s3.url("p", bucket="nowhere")) as blobs:
        for call in (blobs.read("a"), blobs.write("a", b"", None), blobs.put("a", b""), blobs.names("")):
            with pytest.raises(InvalidRequest, match=r"s3://nowhere/p at 127.*no such bucket"):
                await call


async def test_nobody_at_the_address_is_reported_in_a_few_tries() -> None:
    options = "endpoint=http://127.0.0.1:9&allow_http=on&access_key_id=a&secret_access_key=hidden&region=r"
    async with opened(f"s3://b/p?{options}") as blobs:
        for kind, call in ((BackendUnavailable, blobs.read("a")), (Unclear, blobs.write("a", b"", None))):
            with pytest.raises(kind) as error:
                await call
            assert "hidden" not in str(error.value)


# -- the store's time -------------------------------------------------------------------------------------


async def test_the_probe_leaves_nothing_and_only_s3_tells_its_time(blobs: Blobs) -> None:
    await probe(blobs)
    await probe(blobs)
    assert await blobs.names("") == []
    now = await blobs.now()
    assert now is None if not blobs.is_remote else present(now) > 1_600_000_000 * SECOND


class Machine(HeldBlobs):
    """A store that tells a time, and a machine whose clock can be set, beside a steady one that cannot."""

    def __init__(self, offset: Micros | None) -> None:
        super().__init__()
        self.offset = offset
        self.steady, self.clock = FakeClock(), FakeClock()
        self.asked = 0
        self.time = store.StoreTime(self, self.clock, self.steady.now)

    async def now(self) -> Micros | None:
        self.asked += 1
        return None if self.offset is None else self.steady.now() + self.offset


@pytest.mark.parametrize("offset", [None, 2 * SECOND, -SECOND])
async def test_a_difference_that_cannot_be_told_is_none(offset: Micros | None) -> None:
    machine = Machine(offset)
    assert await machine.time.now() == machine.clock.now()


async def test_a_wrong_clock_is_corrected_and_one_that_was_set_is_noticed() -> None:
    machine = Machine(-3600 * SECOND)
    for seconds, asked in ((0, 1), *[(1, 1)] * 100, (store.ASK_EVERY / SECOND, 2)):
        machine.steady.advance(seconds)
        machine.clock.advance(seconds)
        assert await machine.time.now() == machine.steady.now() - 3600 * SECOND
        assert machine.asked == asked
    machine.clock.advance(1800)
    assert await machine.time.now() == machine.steady.now() - 3600 * SECOND
    assert machine.asked == 3


def test_the_steady_clock_never_goes_back() -> None:
    times = [store.steady_us() for _ in range(100)]
    assert times == sorted(times)


# -- files under what files suffer --------------------------------------------------------------------------


on_files = pytest.mark.parametrize("url", ["file"], indirect=True)
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


async def test_what_killed_writers_left_behind_is_swept_away_in_time(tmp_path: Path) -> None:
    unfinished = tmp_path / ".taskharbor" / "unfinished"
    old, young = unfinished / "old", unfinished / "young"
    unfinished.mkdir(parents=True)
    for file in (old, young):
        file.write_bytes(b"")
    long_ago = time.time() - 4000
    os.utime(old, (long_ago, long_ago))
    async with opened(f"file://{tmp_path}") as blobs:
        await blobs.put("a", b"x")
    assert list(unfinished.iterdir()) == [young]


@on_files
async def test_a_lock_never_given_back_is_reported(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "_LOCK_WITHIN", 0.05)
    version = await blobs.write("a", b"x", None)
    (lock,) = (tmp_path / "store" / ".taskharbor" / "locks").iterdir()
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BackendUnavailable, match="is it stopped"):
            await blobs.write("a", b"y", version)
        assert await blobs.read("a") == Blob(b"x", version), "reading needs no lock"
    await blobs.write("a", b"y", version)


@on_files
async def test_a_store_removed_under_an_open_handle_is_made_again(blobs: Blobs, tmp_path: Path) -> None:
    await blobs.write("a/b", b"x", None)
    shutil.rmtree(tmp_path / "store")
    assert await blobs.read("a/b") is None
    await blobs.write("a/b", b"y", None)


@on_files
async def test_files_of_others_and_names_that_lead_elsewhere_are_refused(
    blobs: Blobs, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a").write_bytes(b"a letter")
    with pytest.raises(BackendUnavailable, match="was not written by TaskHarbor"):
        await blobs.read("a")
    for name in ("../a", "a/../b", ".hidden", "/etc/passwd", "", "a//b"):
        with pytest.raises(InvalidRequest, match="not a name"):
            await blobs.put(name, b"")
    async with opened(f"file://{tmp_path}/store/a/store") as nowhere:
        with pytest.raises(BackendUnavailable, match="rights to write"):
            await nowhere.write("a", b"", None)


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
