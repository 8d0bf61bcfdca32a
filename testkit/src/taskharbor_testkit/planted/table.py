"""The table of planted bugs: the cases of the kit that catch each of them.

It judges the deletion of a case: a bug that no other case catches would no longer be caught by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec

from taskharbor_testkit.conformance import CASES, check
from taskharbor_testkit.conformance.machine import Effort
from taskharbor_testkit.conformance.runner import MACHINE
from taskharbor_testkit.planted import PLANTED, RULES

EFFORT = Effort(examples=40, shrink=False)

_SHOWN = 4
"""The number of case names per bug in the Markdown table."""


class Caught(msgspec.Struct, frozen=True):
    """One planted bug and the cases that catch it."""

    bug: str
    rule: str
    cases: list[str]
    """Named cases, those that catch the fewest bugs first."""
    by_machine: bool


def make_table(bugs: Sequence[str], processes: int = 1) -> list[Caught]:
    """Run the whole kit on each of these bugs."""
    with ProcessPoolExecutor(processes) as pool:
        failed = dict(zip(bugs, pool.map(_failed_cases, bugs), strict=True))
    caught = Counter(name for names in failed.values() for name in names)
    order = list(CASES)
    return [
        Caught(
            bug=bug,
            rule=RULES[bug],
            cases=sorted(set(names) - {MACHINE}, key=lambda name: (caught[name], order.index(name))),
            by_machine=MACHINE in names,
        )
        for bug, names in failed.items()
    ]


def _failed_cases(bug: str) -> list[str]:
    return [verdict.name for verdict in check(PLANTED[bug], effort=EFFORT).failures]


def as_markdown(table: Sequence[Caught]) -> str:
    used = {name for one in table for name in one.cases}
    sections = {
        "Bugs that one named case alone catches": _bullets(
            f"`{one.bug}`: `{one.cases[0]}`{' (and the state machine)' * one.by_machine}"
            for one in table
            if len(one.cases) == 1
        ),
        "Bugs that only the state machine catches": _bullets(
            f"`{one.bug}`" for one in table if not one.cases and one.by_machine
        ),
        "Bugs that nothing catches": _bullets(
            f"`{one.bug}`" for one in table if not one.cases and not one.by_machine
        ),
        "All bugs": [
            "| bug | rule | cases | state machine | cases that catch it, the most specific first |",
            "|---|---|---|---|---|",
            *(_row(one) for one in sorted(table, key=lambda one: one.bug)),
        ],
        "Cases that catch none of these bugs": _bullets(f"`{name}`" for name in CASES if name not in used),
    }
    lines = [
        "# Planted bugs",
        "",
        "Made by `python -m taskharbor_testkit.planted --markdown`; do not edit it. Each bug breaks one rule of the contract.",
        "The table tells which named cases of the kit catch it, and whether the state machine does.",
        f"{len(table)} bugs, {len(CASES)} cases; {len(CASES) - len(used)} cases catch none of these bugs.",
    ]
    for title, texts in sections.items():
        lines += ["", f"## {title}", "", *texts]
    return "\n".join(lines) + "\n"


def _bullets(texts: Iterable[str]) -> list[str]:
    return [f"- {text}" for text in texts] or ["None."]


def _row(one: Caught) -> str:
    names = ", ".join(f"`{name}`" for name in one.cases[:_SHOWN])
    rest = f" and {len(one.cases) - _SHOWN} more" if len(one.cases) > _SHOWN else ""
    machine = "yes" if one.by_machine else "no"
    return f"| `{one.bug}` | {one.rule} | {len(one.cases)} | {machine} | {names}{rest} |"
