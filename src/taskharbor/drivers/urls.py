"""Options in the URLs of stores, which every driver reads in the same way. No I/O, so a wrong option is found before any work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias
from urllib.parse import parse_qsl

from taskharbor.errors import InvalidRequest

Reader: TypeAlias = Callable[[str, str], object]
"""A function of the name and text of an option that returns its value. Raises InvalidRequest, without quoting a secret."""


def read_options(query: str, readers: Mapping[str, Reader], kind: str) -> dict[str, object]:
    """Return the options of a URL. If an option is given twice, the last counts. `kind` names the URL in errors."""
    found: dict[str, object] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        read = readers.get(name)
        if read is None:
            raise InvalidRequest(f"unknown option {name!r} in the {kind} URL: there are {', '.join(readers)}")
        found[name] = read(name, text)
    return found


def seconds(name: str, text: str, *, least: float = 0.001, most: int = 3600) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not least <= found <= most:
        raise InvalidRequest(f"{name}={text!r}: give seconds between {least:g} and {most}")
    return found


def whole(least: int, most: int) -> Reader:
    def read(name: str, text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= most:
            raise InvalidRequest(f"{name}={text!r}: give a whole number between {least} and {most}")
        return int(text)

    return read


def choice(*choices: str) -> Reader:
    def read(name: str, text: str) -> str:
        if text not in choices:
            raise InvalidRequest(f"{name}={text!r}: choose {' or '.join(choices)}")
        return text

    return read


def switch(name: str, text: str) -> bool:
    return choice("on", "off")(name, text) == "on"


def some_text(name: str, text: str) -> str:
    if not text:
        raise InvalidRequest(f"{name}=: give a value, or leave the option out")
    return text
