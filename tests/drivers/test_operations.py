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
from taskharbor.drivers.contract import Ack, Driver, Extension, Fail, JobFilter, QueueSettings
from taskharbor.drivers.memory import MemoryDriver
from taskharbor.drivers.validation import check, check_records, check_texts
from taskharbor.errors import InvalidRequest
from taskharbor.jobs import LATEST, SECOND, Failure, JobRecord, UpdateFlags

BOOM = Failure("Boom", "")
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


def test_a_batch_is_the_list_that_comes_first() -> None:
    batches = {name: call.batch for name, call in op.OPERATIONS.items() if call.batch is not None}
    assert batches == {
        "enqueue": "records",
        "extend_lease": "extensions",
        "settle": "settlements",
        "cancel": "job_ids",
        "requeue": "job_ids",
        "get": "job_ids",
        "remove": "job_ids",
        "read_blobs": "names",
        "drop_blobs": "names",
    }


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
        ({"queue": ""}, r"queue '': expected `str` of length >= 1 \(in records\[1\]\)"),
        ({"queue": " "}, "queue ' ': .* not only blanks"),
        ({"queue": "a\0"}, r"queue 'a\\x00': .* without NUL"),
        ({"key": "\ud800"}, r"key '\\ud800': .* lone surrogates"),
        ({"type": "x" * 201}, "type of 201 characters: expected `str` of length <= 200"),
        ({"headers": {"a": 1}}, "headers of type dict: expected `str`, got `int`"),
        ({"headers": {"a": "x" * 9_000}}, "headers of 9001 bytes: at most 8192"),
        ({"backoff_min_us": "x"}, "backoff_min_us 'x': expected `int`, got `str`"),
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


def test_what_only_a_store_decides_is_not_checked_in_a_given_record() -> None:
    check_records([job(state="nonsense", attempts=-1, token=5, last_error="\0")])


def test_names_of_any_script_and_length_up_to_the_bound_pass() -> None:
    check_records([job(id="ü" * 200, type="🚢", queue="a b", key="\n k", headers={"": ""}, payload=b"\0")])


@pytest.mark.parametrize(
    "call",
    [
        op.Settle(["ack"], NOW),  # type: ignore[list-item]
        op.Settle([Ack("a", "t"), Extension("a", "t")], NOW),  # type: ignore[list-item]
        op.Settle([Ack("a", "t"), Fail("a", "t", 1, Failure("\0", ""))], NOW),
        op.Settle([Ack("a", "t"), Fail("a", "t", 1, {"type": "a", "message": "", "detail": ""})], NOW),  # type: ignore[arg-type]
        op.Configure("q", {"paused": True}, NOW),  # type: ignore[arg-type]
        op.Configure("q", QueueSettings(failure_queue="q"), NOW),
        op.ListJobs(JobFilter(types=frozenset({"\0"})), NOW),
        op.Reserve("q", 1, 0, NOW, "w"),
        op.Reserve("q", 1, LATEST, NOW, "w"),
        op.ExtendLease([Extension("a", "t")], LATEST - NOW + 1, NOW),
        op.ReadBlobs(["writes", "staging", "writes"]),
        op.PublishBlobs("s", 0, 1, ["staging/a", "staging/a"], NOW),
        op.Get("abc", NOW),  # type: ignore[arg-type]
        op.Wait([], NOW, 1.0),
        op.Wait([f"q{n}" for n in range(257)], NOW, 1.0),
    ],
    ids=lambda call: str(call)[:80],
)
def test_calls_that_python_code_made_are_checked_as_those_from_the_wire(call: op.Operation[Any]) -> None:
    with pytest.raises(InvalidRequest):
        check(call)


def test_a_lease_ends_at_the_last_instant_at_the_latest() -> None:
    longest = LATEST - NOW
    check(op.Reserve("q", 1, longest, NOW, "w"))
    with pytest.raises(InvalidRequest, match=f"lease_for {longest + 1}: .* at most {longest}"):
        check(op.Reserve("q", 1, longest + 1, NOW, "w"))


def test_a_decoded_call_needs_a_check_of_its_texts_only() -> None:
    good = op.Enqueue([job()], NOW)
    check_texts(msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=op.Enqueue))
    bad = msgspec.msgpack.decode(msgspec.msgpack.encode(op.Enqueue([job(queue=" ")], NOW)), type=op.Enqueue)
    with pytest.raises(InvalidRequest, match="queue ' '"):
        check_texts(bad)
    with pytest.raises(msgspec.ValidationError, match="queue"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(op.Enqueue([job(queue="")], NOW)), type=op.Enqueue)


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
    for call in (
        driver.get("ab", now=NOW),
        driver.cancel("ab", now=NOW),
        driver.requeue("ab", now=NOW),
        driver.wait("ab", now=NOW, timeout=0),
        driver.reserve("q", limit=1, lease_for=SECOND, now=NOW, worker="w", types="ab"),
        driver.enqueue(None, now=NOW),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            InvalidRequest, match=r"(job_ids 'ab'|queues 'ab'|types 'ab'|records None): expected a list"
        ):
            await call


def test_a_blob_with_text_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no jobs"):
        unpack(b"\x91\xdc\x00\x11" + b"\xa1\xff" * 17)
