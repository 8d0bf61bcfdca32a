"""What every store must do, on every store: files, memory, and S3 over real HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from drivers.objectstore.faulty_blobs import Fault, FaultyBlobs, Weather
from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.marks import NAME, add, all_marks, marks_object
from taskharbor.drivers.objectstore.blobs import (
    Blob,
    Blobs,
    Conflict,
    Data,
    Unclear,
    Version,
    probe,
)
from taskharbor.drivers.objectstore.cas import CasObject
from taskharbor.drivers.objectstore.options import parse_url
from taskharbor.errors import BackendUnavailable, InvalidRequest
from taskharbor_testkit.servers.s3 import S3Server, fresh_s3_url

KINDS = ["file", "mem", "s3"]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "file":
            return f"file://{tmp_path}/store"
        case "mem":
            return f"mem://{secrets.token_hex(6)}"
        case _:
            return fresh_s3_url()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Blobs]:
    blobs = parse_url(url).open()
    try:
        yield blobs
    finally:
        await blobs.close()


def on(url: str, story: Callable[[Blobs], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(url) as blobs:
            await story(blobs)

    asyncio.run(main())


def test_what_was_written_is_read_with_its_version(url: str) -> None:
    async def story(blobs: Blobs) -> None:
        assert await blobs.read("a/b") is None
        version = await blobs.write("a/b", b"one", None)
        assert await blobs.read("a/b") == Blob(b"one", version)
        newer = await blobs.write("a/b", b"two", version)
        assert newer != version
        assert await blobs.read("a/b") == Blob(b"two", newer)

    on(url, story)


def test_nothing_is_created_over_what_is_there(url: str) -> None:
    async def story(blobs: Blobs) -> None:
        await blobs.write("a", b"one", None)
        with pytest.raises(Conflict):
            await blobs.write("a", b"two", None)
        blob = await blobs.read("a")
        assert blob is not None
        assert blob.data == b"one"

    on(url, story)


def test_only_the_known_version_is_replaced(url: str) -> None:
    async def story(blobs: Blobs) -> None:
        first = await blobs.write("a", b"one", None)
        second = await blobs.write("a", b"two", first)
        with pytest.raises(Conflict):
            await blobs.write("a", b"three", first)
        assert await blobs.read("a") == Blob(b"two", second)
        await blobs.delete(["a"])
        with pytest.raises(Conflict):
            await blobs.write("a", b"four", second)
        assert await blobs.read("a") is None

    on(url, story)


@pytest.mark.parametrize("url", ["file", "mem"], indirect=True)
def test_an_object_that_was_removed_and_made_again_is_not_taken_for_the_old_one(url: str) -> None:
    # S3 tells versions by content, and every content of a compare-and-swap object has an id of its own.
    async def story(blobs: Blobs) -> None:
        old = await blobs.write("a", b"same", None)
        await blobs.delete(["a"])
        await blobs.write("a", b"same", None)
        with pytest.raises(Conflict):
            await blobs.write("a", b"other", old)

    on(url, story)


def test_a_conditional_read_brings_news_only(url: str) -> None:
    async def story(blobs: Blobs) -> None:
        first = await blobs.write("a", b"one", None)
        assert await blobs.read("a", first) is None
        second = await blobs.write("a", b"two", first)
        assert await blobs.read("a", first) == Blob(b"two", second)
        await blobs.delete(["a"])
        assert await blobs.read("a", second) is None

    on(url, story)


def test_names_are_listed_by_folder_and_in_order(url: str) -> None:
    async def story(blobs: Blobs) -> None:
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
        blob = await blobs.read("log/deep/c")
        assert blob is not None
        assert blob.data == b"again"

    on(url, story)


def test_objects_may_be_empty_or_large(url: str) -> None:
    async def story(blobs: Blobs) -> None:
        large = secrets.token_bytes(6 * 1024 * 1024)
        version = await blobs.write("a", b"", None)
        assert await blobs.read("a") == Blob(b"", version)
        version = await blobs.write("a", large, version)
        assert await blobs.read("a") == Blob(large, version)
        await blobs.put("b", large)
        blob = await blobs.read("b")
        assert blob is not None
        assert blob.data == large

    on(url, story)


async def test_of_many_who_create_or_replace_at_once_one_succeeds(url: str) -> None:
    async def wins(writes: list[Awaitable[Version]]) -> list[Version]:
        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(answer, Version | Conflict) for answer in answers)
        return [answer for answer in answers if isinstance(answer, Version)]

    crew = [parse_url(url).open() for _ in range(8)]
    (version,) = await wins([blobs.write("a", f"{n}".encode(), None) for n, blobs in enumerate(crew)])
    for turn in range(5):
        (version,) = await wins(
            [blobs.write("a", f"{turn} {n}".encode(), version) for n, blobs in enumerate(crew)]
        )
    for blobs in crew:
        await blobs.close()


async def test_objects_of_several_handles_lose_nothing(url: str) -> None:
    crew = [parse_url(url).open() for _ in range(4)]
    handles = [marks_object(blobs) for blobs in crew]

    async def work(number: int) -> None:
        for step in range(8):
            await handles[number % 4].change(add(f"{number}.{step}"))

    await asyncio.gather(*(work(number) for number in range(12)))
    marks = await handles[0].look(all_marks)
    assert len(marks) == len(set(marks)) == 96
    for cas in handles:
        await cas.close()
    for blobs in crew:
        await blobs.close()


def test_the_probe_trusts_it_and_leaves_nothing_behind(url: str) -> None:
    async def story(blobs: Blobs) -> None:
        await probe(blobs)
        await probe(blobs)
        assert await blobs.names("") == []

    on(url, story)


# -- the probe --------------------------------------------------------------------------------------------


class CreatesOver(HeldBlobs):
    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        if known is None:
            await self.delete([name])
        return await super().write(name, data, known)


class ReplacesAnything(HeldBlobs):
    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        return await super().write(name, data, known and self.objects[name].version)


class RefusesAll(HeldBlobs):
    async def write(self, name: str, data: Data, known: Version | None) -> Version:
        if known is not None:
            raise Conflict
        return await super().write(name, data, known)


class ReadsOld(HeldBlobs):
    async def read(self, name: str, unless: Version | None = None, size: int | None = None) -> Blob | None:
        blob = await super().read(name, unless, size)
        return None if blob is None else Blob(b"first", blob.version)


class SameVersion(HeldBlobs):
    def _keep(self, name: str, data: bytes) -> Version:
        self.objects[name] = Blob(data, Version("always"))
        return Version("always")


@pytest.mark.parametrize(
    ("liar", "lie"),
    [
        (CreatesOver, "created an object that was there already"),
        (ReplacesAnything, "replaced a version that was not there any more"),
        (RefusesAll, "refused to replace the very version"),
        (ReadsOld, "did not show what it had last confirmed"),
        (SameVersion, "gave two contents the same version"),
    ],
)
def test_a_store_that_lies_is_refused(liar: type[HeldBlobs], lie: str) -> None:
    with pytest.raises(InvalidRequest, match=lie) as refusal:
        asyncio.run(probe(liar()))
    assert "Use a store with conditional writes" in str(refusal.value)


@pytest.mark.parametrize("fault", list(Fault))
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


UNCLEAR: list[str] = [
    "cut_after",
    "cut_before",
    "error_500_after",
    "error_500_before",
    "error_503_before",
    "silent_after",
    "silent_before",
]


@pytest.mark.parametrize("fault", UNCLEAR)
def test_an_answer_that_does_not_come_leaves_a_write_unclear(s3: S3Server, fault: str) -> None:
    async def story(blobs: Blobs) -> None:
        version = await blobs.write("a", b"old", None)
        s3.plan(fault)
        with pytest.raises(Unclear) as unclear:
            await blobs.write("a", b"new", version)
        assert "test" not in str(unclear.value), "no key, no secret"
        blob = await blobs.read("a")
        assert blob is not None
        assert blob.data == (b"new" if fault.endswith("after") else b"old")

    on(s3.fresh_url(timeout="1"), story)


@pytest.mark.parametrize("fault", ["conflict_409", "refused_after"])
def test_a_refusal_is_a_conflict_whatever_is_behind_it(s3: S3Server, fault: str) -> None:
    async def story(blobs: Blobs) -> None:
        version = await blobs.write("a", b"old", None)
        s3.plan(fault)
        with pytest.raises(Conflict):
            await blobs.write("a", b"new", version)

    on(s3.fresh_url(), story)


@pytest.mark.parametrize("fault", [*UNCLEAR, "conflict_409", "refused_after"])
def test_an_object_on_s3_makes_its_change_once_whatever_the_answer(s3: S3Server, fault: str) -> None:
    async def story(blobs: Blobs) -> None:
        cas = marks_object(blobs)
        s3.plan(fault)
        assert await cas.change(add("first")) == 0
        s3.plan(fault, fault)
        assert await cas.change(add("second")) == 1
        assert await marks_object(blobs).look(all_marks) == ["first", "second"]

    on(s3.fresh_url(timeout="0.5"), story)


def test_a_store_that_stands_still_is_reported_and_works_again_afterwards(s3: S3Server) -> None:
    async def story(blobs: Blobs) -> None:
        cas: CasObject = marks_object(blobs)
        await cas.change(add("before"))
        s3.pause()
        try:
            with pytest.raises(BackendUnavailable, match="can it be reached"):
                await cas.look(all_marks)
        finally:
            s3.resume()
        assert await cas.change(add("after")) == 1

    on(s3.fresh_url(timeout="0.2"), story)


def test_who_is_not_let_in_is_told_so_without_the_keys(s3: S3Server) -> None:
    async def story(blobs: Blobs) -> None:
        s3.plan("forbidden_403")
        with pytest.raises(InvalidRequest, match="check the credentials") as refusal:
            await blobs.write("a", b"", None)
        assert "hidden" not in str(refusal.value)

    on(s3.fresh_url(secret_access_key="hidden"), story)


def test_a_bucket_that_is_not_there_is_named(s3: S3Server) -> None:
    async def story(blobs: Blobs) -> None:
        for call in (blobs.read("a"), blobs.write("a", b"", None), blobs.put("a", b""), blobs.names("")):
            with pytest.raises(InvalidRequest, match=r"s3://nowhere/p at 127.*no such bucket"):
                await call

    on(s3.url("p", bucket="nowhere"), story)


def test_nobody_at_the_address_is_reported_in_a_few_tries() -> None:
    async def story(blobs: Blobs) -> None:
        with pytest.raises(BackendUnavailable):
            await blobs.read("a")
        with pytest.raises(Unclear):
            await blobs.write("a", b"", None)

    on(
        "s3://b/p?endpoint=http://127.0.0.1:9&allow_http=on&access_key_id=a&secret_access_key=b&region=r",
        story,
    )


def test_s3_tells_its_time_and_files_do_not(s3: S3Server, tmp_path: Path) -> None:
    async def story(blobs: Blobs) -> None:
        now = await blobs.now()
        assert now is not None
        assert now > 1_600_000_000 * 1_000_000

    async def silent(blobs: Blobs) -> None:
        assert await blobs.now() is None

    on(s3.fresh_url(), story)
    on(f"file://{tmp_path}", silent)
    on("mem://", silent)


# -- URLs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket/some/prefix?region=eu-central-1", "s3://bucket/some/prefix"),
        ("s3://bucket", "s3://bucket"),
        ("s3://b/p/?endpoint=http://me:hidden@127.0.0.1:9000", "s3://b/p at 127.0.0.1:9000"),
        ("gs://bucket/p", "gs://bucket/p"),
        ("az://container/p?account_name=a&account_key=aGlkZGVu", "az://container/p"),
        ("file:///var/lib/x%20y", "file:///var/lib/x y"),
        ("mem://name", "mem://name"),
        ("mem://", "mem://"),
    ],
)
def test_a_store_is_named_without_its_secrets(url: str, place: str) -> None:
    assert str(parse_url(url)) == place
    # A private store in memory has a number besides, which tells it from others.
    assert parse_url(url).open().place.partition("#")[0] == place


def test_options_of_the_driver_are_told_from_those_of_the_store() -> None:
    parsed = parse_url("s3://b/p?region=r&shards=4&poll=2")
    assert (parsed.options.shards, parsed.options.poll) == (4, 2.0)
    with pytest.raises(InvalidRequest, match=r"'colour'.*region"):
        parse_url("s3://b/p?colour=red")
    with pytest.raises(InvalidRequest, match="'region'"):
        parse_url("file:///p?region=r")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://x", "not an object-store URL"),
        ("s3:///prefix", "write it like s3://bucket"),
        ("s3://b/a/../b", "write it like s3://bucket"),
        ("s3://key:hidden@bucket", "no user and password"),
        ("s3://b?allow_http=yes", "choose on or off"),
        ("s3://b?timeout=never", "seconds between"),
        ("s3://b?region=", "leave the option out"),
        ("file://relative/path", "write it like file:///"),
        ("file://", "write it like file:///"),
        ("mem://a/b", "write it like mem://name"),
        ("s3://b/p#x", "no part after #"),
    ],
)
def test_a_wrong_url_is_refused_with_the_right_one(url: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        parse_url(url)
    assert "hidden" not in str(refusal.value)


async def test_memory_is_shared_by_name_and_otherwise_private() -> None:
    name = secrets.token_hex(6)
    one, other = parse_url(f"mem://{name}").open(), parse_url(f"mem://{name}").open()
    await one.write(NAME, b"x", None)
    assert await other.read(NAME) is not None
    assert one.place == other.place
    private = parse_url("mem://")
    await private.open().write(NAME, b"x", None)
    assert await private.open().read(NAME) is not None
    assert await parse_url("mem://").open().read(NAME) is None


def test_versions_are_compared_as_their_store_compares_them() -> None:
    assert Version("a") == Version("a")
    assert Version("a") != Version("b")
    assert Version('"a"', "7") == Version("a", "7"), "numbers count where there are some"
    assert Version("a", "7") != Version("a", "8")
    assert Version("a", "7") == Version("a")
    assert Version("a") != "a"
