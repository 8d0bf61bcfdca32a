"""Lua from `lua/*.lua`: one file per transition, and files of functions that several of them share.

A line `-- needs: records, keyed` puts those files in front, each once, those they need themselves first. A line
`-- in case: ending: sweep, close_up` does so for functions that few calls use: they are there, with all they need, once the
script has called `make_ready`, and cost nothing before. A line `-- reads only` says that a script changes nothing, so nobody
waits for replicas after it.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from taskharbor.drivers.redis.tightening import tightened

_NEEDS = re.compile(r"^-- needs: *(.+)$", re.MULTILINE)
_IN_CASE = re.compile(r"^-- in case: *(\w+): *(.+)$", re.MULTILINE)
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
    _set_aside(own, parts)
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


def _set_aside(own: str, parts: dict[str, str]) -> None:
    """Put what is needed in case between what is needed anyway and the script itself."""
    found = _IN_CASE.search(own)
    if found is None:
        return
    name, names = found[1], found[2]
    known = set(parts)
    *before, last = parts.items()
    together = dict(parts)
    _gather(name, together, ())
    aside = "\n".join(text for part, text in together.items() if part not in known)
    parts.clear()
    parts.update(before)
    # Not `local function`: that is how functions begin which the script may do without.
    parts[f"in case {name}"] = f"""local {names}
local all_in_case = function()
{aside}
return {names}
end
local function make_ready()
  if not {names.partition(",")[0]} then {names} = all_in_case() end
end
"""
    parts[last[0]] = last[1]


@cache
def _text(name: str) -> str:
    return (files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")
