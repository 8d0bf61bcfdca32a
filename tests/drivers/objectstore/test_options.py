"""URLs: the address of a store and its options, handles that share a store by its URL, and handles used the wrong way."""

from __future__ import annotations

import secrets

import pytest

from drivers.objectstore.harness import finish
from records import NOW, make_record
from taskharbor.drivers.contract import JobFilter
from taskharbor.drivers.objectstore import ObjectStoreDriver
from taskharbor.drivers.objectstore.options import parse_url
from taskharbor.drivers.registry import connect
from taskharbor.errors import BackendUnavailable, InvalidRequest


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
    assert isinstance(connect(url), ObjectStoreDriver)
    assert str(parse_url(url)) == place
    # A private store in memory has a number besides, which tells it from others.
    assert parse_url(url).open().place.partition("#")[0] == place


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://x", "not an object-store URL"),
        ("s3:///prefix", "write it like s3://bucket"),
        ("s3://b/a/../b", "write it like s3://bucket"),
        ("s3://key:hidden@bucket", "no user and password"),
        ("s3://b?allow_http=yes", "choose on or off"),
        ("s3://b?timeout=never", "seconds between"),
        ("file://relative/path", "write it like file:///"),
        ("mem://a/b", "write it like mem://name"),
        ("s3://b/p#x", "no part after #"),
        ("s3://b/p?colour=red", r"'colour'.*region"),
        ("file:///p?region=r", "'region'"),
        ("mem://name?shards=0", "shards"),
        ("mem://name?poll=-1", "poll"),
        ("mem://name?segment_rows=0", "segment_rows"),
        ("mem://name?merge=1", "merge"),
    ],
)
def test_a_wrong_url_is_refused_with_the_right_one(url: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refusal:
        parse_url(url)
    assert "hidden" not in str(refusal.value)


async def test_memory_is_shared_by_name_and_otherwise_private() -> None:
    name = f"mem://{secrets.token_hex(6)}"
    async with connect(name) as one, connect(name) as other, connect("mem://") as alone:
        await one.enqueue([make_record()], now=NOW)
        assert len(await other.stats(now=NOW)) == 1
        await alone.enqueue([make_record()], now=NOW)
        async with alone.clone() as its_clone, connect("mem://") as another:
            assert len(await its_clone.stats(now=NOW)) == 1
            assert await another.stats(now=NOW) == []
    with pytest.raises(BackendUnavailable, match=r"open\(\)"):
        await alone.stats(now=NOW)
    assert parse_url(name).open().place == parse_url(name).open().place


@pytest.mark.parametrize(("url", "lasts"), [("mem://", False), ("file:///folder", True)])
def test_a_store_in_memory_claims_no_durability_and_one_in_a_folder_does(url: str, lasts: bool) -> None:
    found = connect(url).capabilities
    assert found.durable is found.multi_process is lasts


async def test_a_cursor_of_another_store_is_refused() -> None:
    async with connect("mem://") as one, connect("mem://") as other:
        await finish(one, 3)
        after = (await one.read_attempts(limit=2)).cursor
        cursor = (await one.list_jobs(JobFilter(), now=NOW, limit=2)).cursor
        assert cursor is not None
        assert len((await one.list_jobs(JobFilter(), now=NOW, cursor=cursor)).jobs) == 1
        for store, row, job, says in [
            (other, after, cursor, "another store"),
            *((one, broken, broken, "not a cursor") for broken in ("", "x", "!!", "gA==")),
        ]:
            for call in (
                store.read_attempts(after=row),
                store.list_jobs(JobFilter(), now=NOW, cursor=job),
                store.list_jobs(JobFilter(until=job), now=NOW),
            ):
                with pytest.raises(InvalidRequest, match=says):
                    await call
