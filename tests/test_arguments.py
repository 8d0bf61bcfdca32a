"""A function's signature as a payload type."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pytest

from taskharbor import JSON, MSGPACK, InvalidRequest, PayloadInvalid
from taskharbor.codec import Arguments

if TYPE_CHECKING:
    from decimal import Decimal


class Point(msgspec.Struct):
    x: int
    y: int = 0


def plain(a: int, b: str = "b") -> Any:
    return a, b


def named(a: int, *, b: int, c: int = 3) -> Any:
    return a, b, c


def only(a: int, /, b: int) -> Any:
    return a, b


def variadic(a: int, *rest: int, flag: bool = False, **more: str) -> Any:
    return a, rest, flag, more


def no_arguments() -> str:
    return "called"


def untyped(a, b=None):  # type: ignore[no-untyped-def]
    return a, b


def mutable(items: list[int] = [], table: dict[str, int] = {}) -> Any:  # noqa: B006
    items.append(1)
    return items, table


def structured(point: Point, when: datetime) -> Any:
    return point, when


@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        *((plain, (1,), {}), (plain, (1, "x"), {}), (plain, (), {"b": "y", "a": 2})),
        *((named, (1,), {"b": 2}), (named, (1,), {"c": 9, "b": 2}), (no_arguments, (), {})),
        *((only, (1, 2), {}), (only, (1,), {"b": 2})),
        *((variadic, (1,), {}), (variadic, (1, 2, 3), {"flag": True, "note": "n"})),
        (untyped, ({"deep": [1, None, "x"]},), {}),
        (structured, (Point(1, 2), datetime.fromisoformat("2030-01-01T00:00:00+00:00")), {}),
    ],
)
def test_a_call_survives_the_way_through_a_payload(codec: Any, function: Any, args: Any, kwargs: Any) -> None:
    arguments = Arguments(function)
    payload = arguments.encode(codec, args, kwargs)
    assert arguments.caller(function)(arguments.decode(codec, payload)) == function(*args, **kwargs)


def test_defaults_are_not_shared_between_calls() -> None:
    arguments = Arguments(mutable)
    for _ in range(3):
        assert arguments.caller(mutable)(arguments.decode(JSON, b"{}")) == ([1], {})


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        *((plain, (), {}), (plain, (1, "b", 3), {}), (plain, (1,), {"nope": 1}), (plain, (1,), {"a": 1})),
        *((named, (1, 2), {}), (variadic, (), {})),
    ],
)
def test_a_call_python_would_refuse_is_a_type_error(function: Any, args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError) as python:
        function(*args, **kwargs)
    with pytest.raises(TypeError) as ours:
        Arguments(function).encode(JSON, args, kwargs)
    assert type(python.value) is type(ours.value)


WRONG = [(plain, ("one",)), (variadic, (1, "two")), (structured, ({"x": "a"}, "later"))]
MISFITS = [b"", b"[1]", b"null", b"{}", b'{"a":"x"}', b'{"a":1,"z":2}', b'{"a":1', b"\xff"]


@pytest.mark.parametrize(("function", "args"), WRONG)
def test_values_of_the_wrong_type_are_refused_before_they_are_sent(function: Any, args: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"\(\): the payload does not fit"):
        Arguments(function).encode(JSON, args, {})


@pytest.mark.parametrize("payload", MISFITS)
def test_a_payload_that_does_not_fit_is_invalid(payload: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        Arguments(plain).decode(JSON, payload)


def test_constraints_of_the_types_hold() -> None:
    def limited(n: Annotated[int, msgspec.Meta(ge=0)]) -> int:
        return n

    limited.__annotations__["n"] = Annotated[int, msgspec.Meta(ge=0)]
    with pytest.raises(PayloadInvalid):
        Arguments(limited).decode(JSON, b'{"n":-1}')


def test_hints_that_exist_for_the_checker_only_are_named() -> None:
    def paid(amount: Decimal) -> None: ...

    with pytest.raises(InvalidRequest, match="TYPE_CHECKING"):
        Arguments(paid)


def test_a_default_is_not_stored() -> None:
    """So a worker of the release before, whose function lacks the parameter, runs the job."""

    def old(n: int) -> int:
        return n

    def new(n: int, extra: str = "", *, more: list[int] | None = None) -> int:
        return n

    payload = Arguments(new).encode(JSON, (1,), {})
    assert Arguments(old).decode(JSON, payload).n == 1
    assert Arguments(new).encode(JSON, (1, "x"), {"more": [2]}) == b'{"n":1,"extra":"x","more":[2]}'
