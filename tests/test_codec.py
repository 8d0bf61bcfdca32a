import datetime
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest

from taskharbor.codec import JSON, MSGPACK, Codec, CodecRegistry
from taskharbor.errors import CodecError, PayloadInvalid

BOTH = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)


@dataclass
class Order:
    id: uuid.UUID
    at: datetime.datetime
    total: Decimal


@BOTH
def test_types_survive_when_asked_for_misfits_say_where_and_what_has_no_form_is_refused(codec: Codec) -> None:
    plain = {"a": [None, True, -(2**53), 1.5, "\u00e9\n"], "": {}}
    assert codec.decode(codec.encode(plain)) == plain
    order = Order(uuid.uuid4(), datetime.datetime.now(datetime.UTC), Decimal("12.30"))
    assert codec.decode(codec.encode(order), Order) == order
    with pytest.raises(PayloadInvalid, match=r"total"):
        codec.decode(codec.encode({"id": str(uuid.uuid4()), "at": "2026-01-01T00:00:00Z"}), Order)
    with pytest.raises(CodecError, match="cannot encode"):
        codec.encode(object())


@BOTH
@pytest.mark.parametrize("data", [b"", b"\xc1", b"{", b"\x00\xff", b"[" * 100_000])
def test_garbage_is_an_error_and_never_more(codec: Codec, data: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        codec.decode(data, Order)


class FakeModel:
    """Looks like a pydantic model to the codecs."""

    def __init__(self, n: int) -> None:
        self.n = n

    def model_dump(self, mode: str) -> dict[str, int]:
        assert mode == "json"
        return {"n": self.n}

    @classmethod
    def model_validate(cls, value: Any) -> "FakeModel":
        return cls(value["n"])


@BOTH
def test_pydantic_like_models_pass_through_their_own_validation(codec: Codec) -> None:
    assert codec.decode(codec.encode(FakeModel(7)), FakeModel).n == 7


def test_a_codec_of_ones_own_joins_by_name_and_an_unknown_one_is_an_error() -> None:
    class Upper:
        name = "upper"

        def encode(self, value: Any) -> bytes:
            return str(value).upper().encode()

        def decode(self, data: bytes, type: Any = Any) -> Any:
            return data.decode().lower()

    codecs = CodecRegistry(Upper())
    assert codecs.get("upper").decode(codecs.get("upper").encode("abc")) == "abc"
    with pytest.raises(CodecError, match=r"unknown codec 'pickle' \(known: json, msgpack, upper\)"):
        codecs.get("pickle")
