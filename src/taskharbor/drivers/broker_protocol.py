"""The driver protocol between a client and a broker: `POST /v1/driver/<operation>`, as both ends know it.

The body is the operation's struct as msgpack (or JSON, where `Content-Type` says so), and the answer comes in the same form: the
contract's own, with the error of an item as `[kind, job id, detail]` in the item's place. Instants are microseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args, get_origin

import msgspec

from taskharbor.drivers.operations import OPERATIONS, Operation
from taskharbor.errors import JobError
from taskharbor.jobs import JobRecord

log = logging.getLogger("taskharbor.http")

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
    if answer == list[JobRecord]:
        return _read_claim
    items = get_args(get_args(answer)[0]) if get_origin(answer) is list else ()
    if JobError not in items:
        return msgspec.msgpack.Decoder(answer).decode
    (other,) = (one for one in items if one is not JobError)
    decode = msgspec.msgpack.Decoder(list[other | tuple[str, str, str]]).decode  # type: ignore[valid-type]
    return lambda data: [_error(*item) if type(item) is tuple else item for item in decode(data)]


_read_jobs = msgspec.msgpack.Decoder(list[JobRecord]).decode


def _read_claim(data: bytes) -> list[JobRecord]:
    """Read claimed jobs. One that is stored with values beyond all bounds is left out, and its lease expires."""
    try:
        return _read_jobs(data)
    except msgspec.ValidationError as error:
        log.error(
            "a claimed job cannot be loaded: %s; run `taskharbor doctor --repair` at the broker's store",
            error,
        )
    jobs: list[JobRecord] = []
    for one in msgspec.msgpack.decode(data, type=list[msgspec.Raw]):
        with suppress(msgspec.ValidationError):
            jobs.append(msgspec.msgpack.decode(one, type=JobRecord))
    return jobs


def _error(kind: str, job_id: str, detail: str) -> JobError:
    return _KINDS.get(kind, JobError)(job_id, detail)


READ_CALL = {name: msgspec.msgpack.Decoder(call).decode for name, call in OPERATIONS.items()}
READ_CALL_JSON = {name: msgspec.json.Decoder(call).decode for name, call in OPERATIONS.items()}
_READ_ANSWER = {name: _reader(call.answer) for name, call in OPERATIONS.items()}


def read_answer(call: Operation[Any] | type[Operation[Any]], data: bytes) -> Any:
    """Decode an answer. Raises msgspec's errors for an answer of another form."""
    return _READ_ANSWER[call.name](data)
