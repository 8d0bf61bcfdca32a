"""What is around a state: its header tells of every write whether it is part of it, as far back as the ring goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskharbor.drivers.objectstore.cas import (
    RING,
    Fate,
    Header,
    new_commit,
    new_header,
    seal,
    unseal,
)
from taskharbor.errors import BackendUnavailable, SchemaMismatch


@given(commits=st.integers(0, 3 * RING), asked=st.integers(1, 4 * RING))
def test_the_ring_tells_the_fate_of_every_write(commits: int, asked: int) -> None:
    header = new_header()
    ids = [new_commit() for _ in range(commits)]
    for commit in ids:
        header = header.after(commit, epoch=0)
    assert header.serial == commits
    if asked > commits:
        assert header.fate(asked, new_commit()) is Fate.OPEN
    elif asked <= commits - RING:
        assert header.fate(asked, ids[asked - 1]) is Fate.FORGOTTEN
    else:
        assert header.fate(asked, ids[asked - 1]) is Fate.LANDED
        assert header.fate(asked, new_commit()) is Fate.REFUSED


@given(body=st.binary(max_size=2000), compress=st.booleans())
def test_what_was_sealed_is_unsealed(body: bytes, compress: bool) -> None:
    header = new_header().after(new_commit(), epoch=3)
    again, whole = unseal(b"".join(seal(header, body, compress=compress)), "here")
    assert whole == body
    assert (again.lineage, again.epoch, again.serial, again.ring) == (header.lineage, 3, 1, header.ring)


@given(st.binary(max_size=200))
def test_anything_else_is_refused_with_its_name(data: bytes) -> None:
    with pytest.raises(BackendUnavailable, match="the-object is damaged"):
        unseal(data, "the-object")


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"format 4.*use a newer one"):
        unseal(b"".join(seal(Header(4, b"", 0, 0, b""), b"")), "the-object")


def test_an_object_made_anew_is_not_older_than_the_one_before() -> None:
    old = new_header().after(new_commit(), epoch=0)
    newer = old.after(new_commit(), epoch=0)
    assert old.is_before(newer)
    assert not newer.is_before(old)
    assert not new_header().is_before(newer)


@pytest.mark.parametrize("compress", [False, True])
def test_one_flipped_bit_is_noticed_wherever_it_is(compress: bool) -> None:
    """Or makes no difference: the last byte of a compressed body has bits that nobody reads."""
    header = new_header().after(new_commit(), epoch=3)
    whole = b"".join(seal(header, b"the body of an object" * 10, compress=compress))
    messages: list[str] = []
    for at in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            try:
                found = unseal(bytes(data), "the-object")
            except (BackendUnavailable, SchemaMismatch) as error:
                messages.append(str(error))
            else:
                assert found == unseal(whole, "the-object")
    assert len(messages) >= 8 * len(whole) - 8
    assert all("the-object" in message for message in messages)
