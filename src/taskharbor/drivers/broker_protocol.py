"""The driver protocol between a client and a broker: `POST /v1/driver/<operation>`, as both ends know it.

The body is the operation's struct as msgpack (or JSON, where `Content-Type` says so), and the answer comes in the same form: the
contract's own, with the error of an item as `[kind, job id, detail]` in the item's place. Instants are microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_origin

import msgspec

from taskharbor.drivers.operations import OPERATIONS, Operation
from taskharbor.errors import JobError

VERSION = 3
"""Raised when one side would misunderstand the other."""

PATH = "/v1/driver/"
MSGPACK = "application/msgpack"

REQUEST_ID = "TaskHarbor-Request"
"""Header: a name that no other call has. A call that is repeated under the same name gets the same answer."""
HEARD = "TaskHarbor-Heard"
"""Header: names of earlier calls whose answers have arrived, with a blank between them. They will not be repeated."""
LEADER = "TaskHarbor-Leader"
"""Header of a refusal: the address of the leader."""

_KINDS = {kind.__name__: kind for kind in JobError.__subclasses__()}


def _encode_error(value: Any) -> tuple[str, str, str]:
    if isinstance(value, JobError):
        return type(value).__name__, value.job_id, value.detail
    raise NotImplementedError(f"{type(value).__name__} has no place in the protocol")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_error).encode
encode_json = msgspec.json.Encoder(enc_hook=_encode_error).encode


def _reader(answer: Any) -> Callable[[bytes], Any]:
    items = get_args(get_args(answer)[0]) if get_origin(answer) is list else ()
    if JobError not in items:
        return msgspec.msgpack.Decoder(answer).decode
    (other,) = (one for one in items if one is not JobError)
    decode = msgspec.msgpack.Decoder(list[other | tuple[str, str, str]]).decode  # type: ignore[valid-type]
    return lambda data: [_error(*item) if type(item) is tuple else item for item in decode(data)]


def _error(kind: str, job_id: str, detail: str) -> JobError:
    return _KINDS.get(kind, JobError)(job_id, detail)


READ_CALL = {name: msgspec.msgpack.Decoder(call).decode for name, call in OPERATIONS.items()}
READ_CALL_JSON = {name: msgspec.json.Decoder(call).decode for name, call in OPERATIONS.items()}
_READ_ANSWER = {name: _reader(call.answer) for name, call in OPERATIONS.items()}


def read_answer(call: Operation[Any] | type[Operation[Any]], data: bytes) -> Any:
    """Decode an answer. Raises msgspec's errors for an answer of another form."""
    return _READ_ANSWER[call.name](data)
