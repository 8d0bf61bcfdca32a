"""Lua from `lua/*.lua`: one file per transition, and files of functions that several of them share.

A line `-- needs: records, keyed` puts those files in front, each once, those they need themselves first. A line `-- reads only`
says that a script changes nothing, so nobody waits for replicas after it.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from taskharbor.drivers.redis.tightening import tightened

_NEEDS = re.compile(r"^-- needs: *(.+)$", re.MULTILINE)
_READS_ONLY = re.compile(r"^-- reads only$", re.MULTILINE)


class Script(NamedTuple):
    name: str
    source: str
    sha: str
    """What the server knows it by once it was loaded."""
    writes: bool = True


@cache
def script(name: str) -> Script:
    """The script of this name with all it needs."""
    own = _text(name)
    parts: dict[str, str] = {}
    _gather(name, parts, ())
    return made(name, tightened("\n".join(parts.values())), writes=_READS_ONLY.search(own) is None)


def made(name: str, source: str, *, writes: bool = True) -> Script:
    """A script from a text of its own."""
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, source, sha, writes)


def _gather(name: str, parts: dict[str, str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"lua files need each other in a circle: {' -> '.join((*above, name))}")
    if name in parts:
        return
    text = _text(name)
    for line in _NEEDS.findall(text):
        for needed in line.split(","):
            _gather(needed.strip(), parts, (*above, name))
    parts[name] = text


@cache
def _text(name: str) -> str:
    return (files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")
