"""Values that the broker passes on without a meaning of its own: payloads, results, progress.

They are kept as the text that came, checked but not rebuilt: a number keeps its digits, and a batch costs no more than its bytes.
"""

from __future__ import annotations

import re

import msgspec

from taskharbor.broker.problems import Problem

_decode = msgspec.json.Decoder().decode
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def checked_json(value: msgspec.Raw, max_depth: int, what: str) -> bytes:
    """The JSON text of a value that came in."""
    data = bytes(value)
    # Most values have fewer brackets than are allowed to be open at once.
    if data.count(b"[") + data.count(b"{") > max_depth and _depth(data) > max_depth:
        raise Problem(422, "too_deep", f"the {what} is nested more than {max_depth} deep")
    try:
        _decode(data)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "bad_json", f"the {what} is not valid JSON: {_reason(error)}") from None
    return data


def json_or_none(data: bytes) -> msgspec.Raw | None:
    """Stored bytes for an answer; None where they are not JSON after all. What a producer called JSON was not checked by all."""
    try:
        _decode(data)
    except (ValueError, RecursionError):
        return None
    return msgspec.Raw(data)


def _reason(error: Exception) -> str:
    """What the decoder says of the place; never a piece of the value."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error)


def _depth(data: bytes) -> int:
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", data)):
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest
