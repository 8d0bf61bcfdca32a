"""Columns of a batch as array literals.

A driver for single values adapts every element of a list by itself; for a batch of a thousand jobs that costs more than
the round trip. One string per column, made by `join`, costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def escaped_texts(values: Iterable[str | None]) -> str:
    return "{" + ",".join(["NULL" if value is None else _escaped(value) for value in values]) + "}"


def text_array(values: Sequence[str]) -> str:
    """Quotes and backslashes are rare in ids and types: look once, escape only where one was found."""
    joined = "".join(values)
    if '"' in joined or "\\" in joined:
        return escaped_texts(values)
    return '{"' + '","'.join(values) + '"}' if values else "{}"


def int_array(values: Iterable[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


def ends(payloads: Sequence[bytes]) -> str:
    """0 and the place where each ends in the joined payloads."""
    return int_array(accumulate(map(len, payloads), initial=0))


def _escaped(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
