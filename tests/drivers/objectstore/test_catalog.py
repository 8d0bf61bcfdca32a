"""The root object: one store, its queues, and what they are called."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.objectstore.faulty_blobs import Fault, FaultyBlobs, Weather
from drivers.objectstore.held_blobs import HeldBlobs
from drivers.objectstore.marks import FixedTerm
from drivers.objectstore.virtual_time import VirtualLoop
from taskharbor.drivers.objectstore.blobs import Blob
from taskharbor.drivers.objectstore.cas import Deposed, seal, unseal
from taskharbor.drivers.objectstore.catalog import (
    CATALOG,
    Catalog,
    escaped,
    log_folder,
    state_name,
)
from taskharbor.drivers.objectstore.leadership import raise_epochs
from taskharbor.errors import InvalidRequest, SchemaMismatch


def run(story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(story)


def test_who_opens_first_makes_the_store_and_the_others_find_it() -> None:
    async def story() -> None:
        blobs = HeldBlobs()
        crew = [Catalog(blobs) for _ in range(5)]
        await asyncio.gather(*(catalog.open() for catalog in crew))
        assert len({catalog.store_id for catalog in crew}) == 1
        assert crew[0].store_id
        assert {catalog.shards for catalog in crew} == {1}
        assert (await Catalog(HeldBlobs()).open()).store_id != crew[0].store_id

    run(story())


def test_the_number_of_shards_is_fixed_when_the_store_is_made() -> None:
    async def story() -> None:
        blobs = HeldBlobs()
        assert (await Catalog(blobs, shards=4).open()).shards == 4
        assert (await Catalog(blobs).open()).shards == 4
        assert (await Catalog(blobs, shards=4).open()).shards == 4
        with pytest.raises(InvalidRequest, match="write shards=4 or leave the option out"):
            await Catalog(blobs, shards=2).open()

    run(story())


def test_queues_are_added_once_and_seen_by_everybody() -> None:
    async def story() -> None:
        weather = Weather()
        blobs = FaultyBlobs(HeldBlobs(), weather)
        one, other = await Catalog(blobs).open(), await Catalog(blobs).open()
        await one.add_queues(["mail", "print", "mail"])
        await other.add_queues(["print", "scan"])
        assert await one.queues() == ["mail", "print", "scan"]
        assert await other.queues() == ["mail", "print", "scan"]
        writes, reads = weather.writes, weather.reads
        await other.add_queues(["mail", "scan"])
        assert (weather.writes, weather.reads) == (writes, reads), "what is known costs nothing"
        assert list(one.state_names(["mail"])) == ["queues/mail/0/state"]

    run(story())


@pytest.mark.parametrize("fault", list(Fault))
def test_a_store_is_made_and_a_queue_added_whatever_becomes_of_the_writes(fault: Fault) -> None:
    async def story() -> None:
        weather = Weather()
        held = HeldBlobs()
        weather.next_write(fault)
        catalog = await Catalog(FaultyBlobs(held, weather)).open()
        weather.next_write(fault)
        await catalog.add_queues(["mail"])
        await weather.land()
        other = await Catalog(held).open()
        assert (other.store_id, await other.queues()) == (catalog.store_id, ["mail"])

    run(story())


def test_a_deposed_leader_can_add_no_queue() -> None:
    async def story() -> None:
        blobs = HeldBlobs()
        old = await Catalog(blobs).open()
        await raise_epochs(blobs, [CATALOG], FixedTerm(1))
        old.object.lead(FixedTerm(1))
        await old.add_queues(["mail"])
        await raise_epochs(blobs, [CATALOG], FixedTerm(2))
        with pytest.raises(Deposed):
            await old.add_queues(["print"])
        assert await (await Catalog(blobs).open()).queues() == ["mail"]

    run(story())


def test_a_store_of_another_format_is_refused() -> None:
    async def story() -> None:
        blobs = HeldBlobs()
        await Catalog(blobs).open()
        there = blobs.objects[CATALOG]
        header, body = unseal(there.data, "")
        newer = msgspec.structs.replace(header, format=99)
        blobs.objects[CATALOG] = Blob(b"".join(seal(newer, body)), there.version)
        with pytest.raises(SchemaMismatch, match="format 99"):
            await Catalog(blobs).open()

    run(story())


# -- names ------------------------------------------------------------------------------------------------


def unescaped(folder: str) -> str:
    return unquote_to_bytes(folder.replace("=", "%")).decode()


ALLOWED = set("abcdefghijklmnopqrstuvwxyz0123456789_-=.")


@given(st.lists(st.text(min_size=1, max_size=200), min_size=1, max_size=20, unique=True))
def test_every_queue_has_a_folder_of_its_own_that_every_store_allows(queues: list[str]) -> None:
    queues = [queue for queue in queues if not any("\ud800" <= letter <= "\udfff" for letter in queue)]
    folders = [escaped(queue) for queue in queues]
    assert len({folder.lower() for folder in folders}) == len(queues)
    for queue, folder in zip(queues, folders, strict=True):
        assert set(folder) <= ALLOWED
        assert len(folder) <= 120
        assert not folder.startswith(".")
        if len(queue.encode()) <= 40:
            assert unescaped(folder) == queue


@pytest.mark.parametrize(
    ("queue", "folder"),
    [
        ("mail", "mail"),
        ("Mail", "=4dail"),
        ("a/b", "a=2fb"),
        ("..", "=2e=2e"),
        ("a=b", "a=3db"),
        ("ü", "=c3=bc"),
    ],
)
def test_how_a_folder_is_written_never_changes(queue: str, folder: str) -> None:
    assert escaped(queue) == folder
    assert state_name(queue, 3) == f"queues/{folder}/3/state"
    assert log_folder(queue, 0) == f"queues/{folder}/0/log"
