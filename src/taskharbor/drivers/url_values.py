"""Values of options in the URLs of stores, read alike by every driver."""

from __future__ import annotations

from taskharbor.errors import InvalidRequest


def seconds(name: str, value: str, *, most: int = 3600) -> float:
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0.001 <= found <= most:
        raise InvalidRequest(f"{name}={value!r}: give seconds between 0.001 and {most}")
    return found
