"""The server's part of the driver: one library of Lua functions, made of the files in `lua/` in the order given here.

A server gets it once, by FUNCTION LOAD. Its name has a hash of its text, so several releases can work on one server. If a server
refuses FUNCTION, the same text runs by EVAL behind another header, and defines all functions with every call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

Word: TypeAlias = bytes | str | int

_FILES = (
    "layout", "queue", "records", "lines", "log", "keyed", "leases", "define",
    "enqueue", "reserve", "settle", "operate", "retention", "inspect",
)  # fmt: skip
_DEFINED = re.compile(r"^define\('(\w+)', \{(?:'([\w-]+)')?\}", re.MULTILINE)


class RedisCall(NamedTuple):
    """One call of a function or of a plain command. Commands are written in capitals."""

    function: str
    keys: Sequence[str]
    args: Sequence[Word]


class Library:
    """Lua functions from a text that declares each of them with `define`."""

    def __init__(self, text: str) -> None:
        self.name = f"taskharbor_{_sha1(text)[:16]}"
        self.flags: dict[str, str] = dict(_DEFINED.findall(text))
        """The flag of each function: `no-writes`, `allow-oom` or nothing."""
        self.source = f"#!lua name={self.name}\nlocal LIBRARY = '{self.name}'\n{lua('export_function')}{text}"
        by_eval = f"{lua('export_eval')}{text}{lua('dispatch')}"
        # Without a header, a server with full memory refuses a script at its first write, not before it begins.
        self.scripts = {
            name: f"#!lua flags={flag}\n{by_eval}" if flag else by_eval for name, flag in self.flags.items()
        }
        """The script of each function, for EVAL."""
        self.hashes = {name: _sha1(script) for name, script in self.scripts.items()}


def _sha1(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@cache
def lua(name: str) -> str:
    return (files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")


_CONSTANTS = re.findall(r"^local ([A-Z_, ]+) = (.+?)(?: --.*)?$", lua("layout"), re.MULTILINE)
LAYOUT: dict[str, Any] = {
    name: int(value) if value.isdecimal() else value.strip("'")
    for names, values in _CONSTANTS
    for name, value in zip(names.split(", "), values.split(", "), strict=True)
}
"""The constants of `lua/layout.lua`, which defines the stored bytes for both sides."""
_FORMATS = {"I1": "B", "I2": "H", "I4": "I", "I8": "Q"}


def layout(name: str) -> Struct:
    """Return a format of `lua/layout.lua`."""
    return Struct(re.sub(r"I\d", lambda found: _FORMATS[found[0]], LAYOUT[name]))


FAMILIES: Final = tuple(
    re.findall(r"^local (\w+) +-- (?:zset|set|hash|list|stream)", lua("queue"), re.MULTILINE)
)
"""The keys of a queue. Every function that works on a queue gets all of them, in this order."""
TEXT = "".join(map(lua, _FILES))
LIBRARY = Library(TEXT)
