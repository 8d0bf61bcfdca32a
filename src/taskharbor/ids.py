"""Job ids: UUIDv7 strings, made in batches.

Time-ordered ids keep a backend's id index append-mostly, which is what keeps inserts flat at ten million jobs.
They are generated before the first try of an enqueue, so a repeated try (after an ambiguous commit) carries
the same id and is recognised.
"""

from __future__ import annotations

import os
import secrets
import threading
import time

_lock = threading.Lock()
_last = 0
# Ids of one millisecond differ in these digits only: formatting them for each id would cost most of its time.
_LAST_COUNT = 0xFFF
_COUNTS = [f"{number:03x}" for number in range(_LAST_COUNT + 1)]


def _noise() -> str:
    """The end of an id, another for every call: who knows an id must not be able to guess the next one of the same process."""
    noise = os.urandom(8).hex()
    return f"-{'89ab'[int(noise[0], 16) & 3]}{noise[1:4]}-{noise[4:]}"


def new_ids(count: int) -> list[str]:
    """`count` fresh ids, strictly increasing within this process."""
    start = _next_number(count)
    tail = _noise()
    made: list[str] = []
    for block in range(start & ~_LAST_COUNT, start + count, _LAST_COUNT + 1):
        time_part = f"{block >> 12:012x}"
        head = f"{time_part[:8]}-{time_part[8:]}-7"
        made += [f"{head}{digits}{tail}" for digits in _COUNTS[max(start - block, 0) : start + count - block]]
    return made


def new_id() -> str:
    number = _next_number(1)
    return f"{number >> 28:08x}-{number >> 12 & 0xFFFF:04x}-7{number & _LAST_COUNT:03x}{_noise()}"


def _next_number(count: int) -> int:
    """48 bits of milliseconds, then a 12-bit counter: one 60-bit number that only ever grows. The first of so many."""
    global _last
    with _lock:
        start = max(_last + 1, (time.time_ns() // 1_000_000) << 12)
        _last = start + count - 1
    return start


def new_id_head() -> str:
    """What ids have in common that are made elsewhere, by appending a number of eight hexadecimal digits to this.

    The time in milliseconds and 42 random bits, so nobody else has the same. The numbers may go up from anywhere.
    """
    time_part = f"{time.time_ns() // 1_000_000:012x}"
    noise = os.urandom(6).hex()
    return f"{time_part[:8]}-{time_part[8:]}-7{noise[:3]}-{'89ab'[int(noise[3], 16) & 3]}{noise[4:7]}-{noise[7:11]}"


def new_token() -> str:
    """A lease token nobody can guess. One reserve call may use one token for all its jobs."""
    return secrets.token_hex(12)
