"""Makes a script's text cheaper to run, and leaves its meaning and its line numbers alone.

A script starts anew with every call: each of its functions is made again, and Lua 5.1 looks for every variable that a function
uses in a list of all that are used so. Sixty functions over as many constants and keys cost a third of a small claim. So
constants and keys are written in where they are used, and functions that this script does not use are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

_TOKEN = re.compile(r"--[^\n]*|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"|(?<![.\w])[A-Za-z_]\w*")
_DECLARED = re.compile(r"local (\w+(?:, \w+)*) = (.+)")
_LITERAL = re.compile(r"\d+(?: \* \d+)*|'[^'\\]*'|KEYS\[\d+\]|redis\.call")
_FUNCTION = re.compile(r"local function (\w+)\(")
_ASSIGNED = re.compile(r"(?<![.\w])(\w+(?:, \w+)*)\s*=(?!=)")
_BOUND = re.compile(r"\b(?:local|for) (\w+(?:, \w+)*)")
_PARAMETERS = re.compile(r"\bfunction\b[^()\n]*\(([^()\n]*)\)")


def tightened(source: str) -> str:
    lines = [_without_comment(line) for line in source.split("\n")]
    lines = _with_constants_written_in(lines)
    while (fewer := _without_unused(lines)) != lines:
        lines = fewer
    return "\n".join(lines)


def _without_comment(line: str) -> str:
    return _TOKEN.sub(lambda found: "" if found[0].startswith("--") else found[0], line).rstrip()


def _with_constants_written_in(lines: list[str]) -> list[str]:
    declared: dict[str, str] = {}
    places: dict[int, dict[str, str]] = {}
    for place, line in enumerate(lines):
        constants = _constants(line)
        if constants:
            places[place] = constants
            declared.update(constants)
    rest = "\n".join(line for place, line in enumerate(lines) if place not in places)
    changed = declared.keys() & _names_set(rest)
    for constants in places.values():
        # Declared twice, with two meanings.
        changed |= {name for name, value in constants.items() if declared[name] != value}
    for constants in places.values():
        if changed & constants.keys():
            changed |= constants.keys()
    written = {name: value for name, value in declared.items() if name not in changed}
    return [
        "" if place in places and places[place].keys() <= written.keys() else _replaced(line, written)
        for place, line in enumerate(lines)
    ]


def _constants(line: str) -> dict[str, str]:
    """What a line declares, where that is nothing but literals."""
    found = _DECLARED.fullmatch(line)
    if not found:
        return {}
    names, values = found[1].split(", "), re.split(r", (?=(?:[^']*'[^']*')*[^']*$)", found[2])
    if len(names) != len(values) or not all(_LITERAL.fullmatch(value) for value in values):
        return {}
    return {name: f"({value})" if "*" in value else value for name, value in zip(names, values, strict=True)}


def _names_set(text: str) -> set[str]:
    """What is given a meaning anywhere: assigned, declared again, a parameter, counted by a loop, a table's field."""
    found = [*_ASSIGNED.findall(text), *_BOUND.findall(text), *_PARAMETERS.findall(text)]
    return {name for names in found for name in names.split(", ")}


def _replaced(line: str, written: dict[str, str]) -> str:
    return _TOKEN.sub(lambda found: written.get(found[0], found[0]), line)


def _without_unused(lines: list[str]) -> list[str]:
    kept = list(lines)
    uses: dict[str, int] = {}
    for line in lines:
        for word in _words(line):
            uses[word] = uses.get(word, 0) + 1
    for first, last, name in _functions(lines):
        own = sum(word == name for line in lines[first : last + 1] for word in _words(line))
        if uses[name] == own:
            kept[first : last + 1] = [""] * (last + 1 - first)
    return kept


def _functions(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Those of the outermost level: first and last line, and name."""
    place = 0
    while place < len(lines):
        found = _FUNCTION.match(lines[place])
        first = place
        if found:
            while not (lines[place] == "end" or (place == first and lines[place].endswith(" end"))):
                place += 1
            yield first, place, found[1]
        place += 1


@cache
def _words(line: str) -> list[str]:
    return [word for word in _TOKEN.findall(line) if word[0] not in "'\""]
