"""What a worker and its processes say to each other: msgpack, length first, and never a pickled job.

Down go a job to run and requests to stop; up come progress, log records and how the execution ended.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec

from taskharbor.jobs import Failure, JobRecord, Micros


class Run(msgspec.Struct, frozen=True, tag="run"):
    record: JobRecord
    started_at_us: Micros


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """For the handler's `should_stop`; `cancel` also cancels an async handler."""

    reason: str
    cancel: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process has imported its handlers and can take a job."""


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The handler is about to be called. A process that dies before this has not touched the job."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    data: bytes


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    """The handler itself called `job.stop(reason)`."""

    reason: str


class Logged(msgspec.Struct, frozen=True, tag="logged"):
    """A log record, its message already put together."""

    name: str
    level: int
    message: str
    created: float
    path: str
    line: int
    function: str
    thread: str
    trace: str | None = None
    extra: dict[str, str | int | float | bool | None] = {}


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """The result in the record's codec; None where there is none, or where `complaint` says why it is not kept."""

    result: bytes | None = None
    complaint: str = ""


class Threw(msgspec.Struct, frozen=True, tag="threw"):
    """What the handler raised, in words; `kind` names the signal, if it was one."""

    failure: Failure
    kind: str = ""
    delay_us: Micros | None = None
    at_us: Micros | None = None


Down: TypeAlias = Run | Stop
Up: TypeAlias = Ready | Began | Progress | Stopping | Logged | Returned | Threw

_length = struct.Struct("!I")
_encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def frame(message: Down | Up) -> bytes:
    body = _encode(message)
    return _length.pack(len(body)) + body


class Frames:
    """Takes bytes as they come, gives whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        buffer = self._bytes
        buffer += data
        whole: list[bytes] = []
        start = 0
        while len(buffer) - start >= _length.size:
            end = start + _length.size + _length.unpack_from(buffer, start)[0]
            if len(buffer) < end:
                break
            whole.append(bytes(buffer[start + _length.size : end]))
            start = end
        del buffer[:start]
        return whole
