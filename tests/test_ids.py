import uuid

from taskharbor.requests import new_id, new_id_head, new_ids, new_token


def test_ids_are_uuid7_strictly_increasing_and_do_not_tell_the_next_one() -> None:
    """A broker makes ids for many producers, and none of them may take another's first."""
    head = new_id_head()
    by_head = [f"{head}{number:08x}" for number in (0, 9, 10, 2**31)]
    for ids in (new_ids(5000) + [new_id()] + new_ids(10), by_head):
        assert ids == sorted(set(ids))
        assert {(uuid.UUID(one).version, uuid.UUID(one).variant) for one in ids} == {(7, uuid.RFC_4122)}
    ends = {one.rpartition("-")[2] for one in (new_id(), new_id(), *new_ids(1), *new_ids(1))}
    assert len(ends) == 4
    for make in (new_token, new_id_head):
        assert len({make() for _ in range(1000)}) == 1000


def test_ids_of_one_call_count_up_by_one_across_milliseconds() -> None:
    assert new_ids(0) == []
    for count in (1, 2, 4095, 4096, 4097, 10_000):
        numbers = [int(one.replace("-", "")[:16], 16) for one in new_ids(count)]
        # The digit after the time says the version, which is no part of the number.
        counted = [(number >> 16 << 12) | (number & 0xFFF) for number in numbers]
        assert counted == list(range(counted[0], counted[0] + count))
