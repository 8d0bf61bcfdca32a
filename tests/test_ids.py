import uuid

from taskharbor.ids import new_id, new_ids, new_token


def test_ids_are_uuid7_and_strictly_increasing() -> None:
    ids = new_ids(5000) + [new_id()] + new_ids(10)
    assert ids == sorted(set(ids))
    assert {uuid.UUID(one).version for one in ids} == {7}
    assert {uuid.UUID(one).variant for one in ids} == {uuid.RFC_4122}


def test_no_ids_for_nothing() -> None:
    assert new_ids(0) == []


def test_tokens_differ() -> None:
    assert len({new_token() for _ in range(1000)}) == 1000
