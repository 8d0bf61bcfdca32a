"""The root object: one store, its queues, and the names of their objects."""

from __future__ import annotations

import asyncio
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.objectstore.fake_blobs import FAULTS, Fault, FaultyBlobs, HeldBlobs, Weather
from taskharbor.drivers.objectstore.catalog import Catalog, escaped, log_folder, state_name
from taskharbor.errors import InvalidRequest

ALLOWED = set("abcdefghijklmnopqrstuvwxyz0123456789_-=.")


async def test_the_first_to_open_makes_the_store_and_the_others_find_it() -> None:
    blobs = HeldBlobs()
    catalogs = [Catalog(blobs) for _ in range(5)]
    await asyncio.gather(*(catalog.open() for catalog in catalogs))
    assert len({catalog.store_id for catalog in catalogs}) == 1
    assert {catalog.shards for catalog in catalogs} == {1}
    assert "" != (await Catalog(HeldBlobs()).open()).store_id != catalogs[0].store_id


async def test_the_number_of_shards_is_fixed_when_the_store_is_made() -> None:
    blobs = HeldBlobs()
    for shards in (4, None, 4):
        assert (await Catalog(blobs, shards=shards).open()).shards == 4
    with pytest.raises(InvalidRequest, match="write shards=4 or leave the option out"):
        await Catalog(blobs, shards=2).open()


async def test_queues_are_added_once_and_seen_by_everybody() -> None:
    blobs = HeldBlobs()
    one, other = await Catalog(blobs).open(), await Catalog(blobs).open()
    await one.add_queues(["mail", "print", "mail"])
    await other.add_queues(["print", "scan"])
    assert await one.queues() == await other.queues() == ["mail", "print", "scan"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_store_is_made_and_a_queue_added_whatever_becomes_of_the_writes(fault: Fault) -> None:
    weather = Weather()
    held = HeldBlobs()
    weather.next_write(fault)
    catalog = await Catalog(FaultyBlobs(held, weather)).open()
    weather.next_write(fault)
    await catalog.add_queues(["mail"])
    await weather.land()
    other = await Catalog(held).open()
    assert (other.store_id, await other.queues()) == (catalog.store_id, ["mail"])


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=5, unique=True))
def test_every_queue_has_a_folder_of_its_own_that_every_store_allows(queues: list[str]) -> None:
    queues = [queue for queue in queues if not any("\ud800" <= letter <= "\udfff" for letter in queue)]
    folders = [escaped(queue) for queue in queues]
    assert len({folder.lower() for folder in folders}) == len(queues)
    for queue, folder in zip(queues, folders, strict=True):
        assert set(folder) <= ALLOWED
        assert len(folder) <= 120
        assert not folder.startswith(".")
        if len(queue.encode()) <= 40:
            assert unquote_to_bytes(folder.replace("=", "%")).decode() == queue


@pytest.mark.parametrize(
    ("queue", "folder"),
    [
        *(("mail", "mail"), ("Mail", "=4dail"), ("a/b", "a=2fb")),
        *(("..", "=2e=2e"), ("a=b", "a=3db"), ("ü", "=c3=bc")),
    ],
)
def test_the_spelling_of_a_folder_never_changes(queue: str, folder: str) -> None:
    assert escaped(queue) == folder
    assert state_name(queue, 3) == f"queues/{folder}/3/state"
    assert log_folder(queue, 0) == f"queues/{folder}/0/log"
