"""Where each payload ends among the joined ones, as PostgreSQL itself writes an array of integers.

As text, formatting and reading the numbers would cost about as much as all else that is done for a job when it is staged.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate

from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.pq import Format

_INTEGER = 23
_INTEGERS = 1007
_ONE_DIMENSION = struct.Struct("!iiiii")
# Before each number stands its length in bytes. Both together are eight bytes: this, with the number in the lower half.
_LENGTH = 4 << 32


class Ends:
    """0 and the end of each payload, encoded."""

    __slots__ = ("data",)

    def __init__(self, payloads: Sequence[bytes]) -> None:
        numbers = array("Q", accumulate(map(len, payloads), initial=_LENGTH))
        if sys.byteorder == "little":
            numbers.byteswap()
        self.data = _ONE_DIMENSION.pack(1, 0, _INTEGER, len(numbers), 1) + numbers.tobytes()


class _EndsDumper(Dumper):
    format = Format.BINARY
    oid = _INTEGERS

    def dump(self, obj: Ends) -> bytes:
        return obj.data


def teach(context: AdaptContext) -> None:
    """Let a connection or cursor take `Ends` for a parameter of type integer[]."""
    context.adapters.register_dumper(Ends, _EndsDumper)
