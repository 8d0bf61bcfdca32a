"""Makes text from jobs, stores and other programs safe to show. All output of commands and logs goes through this module."""

from __future__ import annotations

import json
from typing import Any

import msgspec


def printable(text: str, keep: str = "") -> str:
    """Return the text with everything escaped that could begin a line, steer a terminal or change the direction of writing.

    Args:
        text: Stored or remote text.
        keep: Control characters that stay as they are: a line break or a tab, where the text has lines of its own.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode() for one in text
    )


def printable_json(document: Any) -> str:
    """Return a JSON document on one line. Characters that are not printable are escaped, which changes no value."""
    text = msgspec.json.encode(document).decode()
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
