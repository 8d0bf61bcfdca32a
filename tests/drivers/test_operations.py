"""Operations as data, and the one place where calls and records are checked."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, get_args

import msgspec
import pytest

from records import NOW
from records import make_record as job
from taskharbor.bulk.stage import unpack
from taskharbor.drivers import operations as op
from taskharbor.drivers.contract import DAY, Ack, Driver, Extension, Fail
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.validation import check, check_records
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import LATEST, Failure, JobRecord, UpdateFlags

OTHERWISE = {"hello", "time", "wait", "put_blob"}
"""Made by nothing but the HTTP driver, or by two methods."""


# -- the table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(op.OPERATIONS.keys() - OTHERWISE))
def test_an_operation_has_the_fields_and_the_answer_of_its_method(name: str) -> None:
    call = op.OPERATIONS[name]
    method = inspect.signature(getattr(Driver, name), eval_str=True)
    parameters = {one.name: one for one in list(method.parameters.values())[1:]}
    fields = {field.name: field for field in msgspec.structs.fields(call)}
    assert parameters.keys() == fields.keys()
    for field in fields.values():
        wanted = parameters[field.name].default
        assert field.required or field.default == wanted
    assert call.answer == method.return_annotation or method.return_annotation is None


def test_what_changes_a_store_needs_more_than_a_right_to_read() -> None:
    assert {name for name, call in op.OPERATIONS.items() if call.changes and call.scope == "read"} == set()
    assert {call.scope for call in op.OPERATIONS.values()} == set(get_args(op.Scope))


async def test_a_batch_without_items_does_not_reach_the_driver() -> None:
    class Bare(MemoryDriver):
        functions: ClassVar[dict[type[op.Operation[Any]], Any]] = {}

    driver = Bare()
    assert await driver.enqueue([], now=NOW) == []
    assert await driver.settle([], now=NOW) == []
    with pytest.raises(NotImplementedError):
        await driver.prune(now=NOW)


# -- validation -------------------------------------------------------------------------------------------


def test_msgspec_checks_nothing_when_it_converts_a_struct_into_its_own_type() -> None:
    """Why validation converts into twins. When this fails, they can go."""
    wrong = job(queue=5, headers={"a": 1}, backoff_min_us="x")
    assert msgspec.convert(wrong, JobRecord) is wrong
    assert msgspec.convert([wrong], list[JobRecord], from_attributes=True)[0].queue == 5  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"queue": 5}, r"queue 5: expected `str`, got `int` \(in records\[1\]\)"),
        ({"queue": " "}, "queue ' ': .* not only blanks"),
        ({"queue": "a\0"}, r"queue 'a\\x00': .* without NUL"),
        ({"key": "\ud800"}, r"key '\\ud800': .* lone surrogates"),
        ({"type": "x" * 201}, "type of 201 characters: expected `str` of length <= 200"),
        ({"headers": {"a": "x" * 9_000}}, "headers of 9001 bytes: at most 8192"),
        ({"run_at_us": LATEST + 1}, "run_at_us 9007199254740992: expected `int` <= 9007199254740991"),
        ({"priority": True}, "priority True: expected `int`, got `bool`"),
        ({"payload": "secret"}, "payload of type str: expected `bytes`, got `str`"),
        ({"payload": bytearray(b"secret")}, "payload: expected `bytes`, got `bytearray`"),
        (
            {"update": UpdateFlags(payload="x")},  # type: ignore[arg-type]
            r"payload of type str: expected `bool`, .*records\[1\]\.update",
        ),
    ],
    ids=str,
)
def test_a_refusal_names_the_field_the_value_and_what_is_allowed(
    fields: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as refusal:
        check_records([job(), job(**fields)])
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "call",
    [
        op.Settle([Ack("a", "t"), Extension("a", "t")], NOW),  # type: ignore[list-item]
        op.Settle([Ack("a", "t"), Fail("a", "t", 1, {"type": "a", "message": "", "detail": ""})], NOW),  # type: ignore[arg-type]
        op.Reserve("q", 1, 2, LATEST - 1, "w"),
        op.ExtendLease([Extension("a", "t")], 2, LATEST - 1),
        op.ReadBlobs(["writes", "staging", "writes"]),
        op.PublishBlobs("s", 0, 1, ["staging/a", "staging/a"], NOW),
        op.Get("abc", NOW),  # type: ignore[arg-type]
        op.Wait([], NOW, 1.0),
        op.Wait([f"q{n}" for n in range(257)], NOW, 1.0),
    ],
    ids=lambda call: str(call)[:80],
)
def test_calls_that_python_code_made_are_checked_as_those_from_the_wire(call: op.Operation[Any]) -> None:
    """(The kit has more of them.)"""
    with pytest.raises(InvalidRequest):
        check(call)


def test_what_is_just_within_the_bounds_passes() -> None:
    """Fields that only a store decides on are not checked in a given record."""
    check(op.Reserve("q", 1, DAY, LATEST - DAY, "w"))
    check_records([job(id="ü" * 200, type="🚢", queue="a b", key="\n k", headers={"": ""}, payload=b"\0")])
    check_records([job(state="nonsense", attempts=-1, token=5, last_error="\0")])


def test_a_failure_is_made_of_texts_from_anywhere() -> None:
    odd = Failure.of("T" * 300, "NUL \0 and \ud800", "x" * 10_000 + "end")
    check(op.Settle([Fail("a", "t", 1, odd)], NOW))
    assert odd.message == "NUL \\0 and \\ud800"
    assert odd.detail.endswith("end")


def test_a_blob_can_be_named_only_where_bulk_writes_keep_theirs() -> None:
    """On an object store every other name is a queue's state, the catalog or a segment."""
    outside = ["", "catalog", "queues/default/0/state", "staging/", "staging//x", "staging/../catalog"]
    for name in [*outside, "writes/x", "writes\n"]:
        for call in (op.PutBlob(name, b""), op.ReadBlobs([name]), op.ListBlobs(name), op.DropBlobs([name])):
            with pytest.raises(InvalidRequest):
                check(call)


async def test_one_text_is_no_list_of_texts() -> None:
    driver = MemoryDriver()
    for field, call in (
        *(("job_ids 'ab'", method("ab", now=NOW)) for method in (driver.get, driver.cancel, driver.requeue)),
        ("queues 'ab'", driver.wait("ab", now=NOW, timeout=0)),
        ("types 'ab'", driver.reserve("q", limit=1, lease_for=9, now=NOW, worker="w", types="ab")),
        ("records None", driver.enqueue(None, now=NOW)),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequest, match=f"{field}: expected a list"):
            await call


def test_a_blob_with_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no jobs"):
        unpack(b"\x91\xdc\x00\x11" + b"\xa1\xff" * 17)
