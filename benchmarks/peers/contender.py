"""Somebody who takes part: what has to be installed, how many jobs it gets, how to ask its backend whether all is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Contender:
    name: str
    program: str
    """The file beside this one without its suffix."""
    settings: str
    """For the report: what it ran with."""
    jobs: int
    """How many a drain gives it. Slow ones get fewer, so that a round ends; a short backlog is rather in their favour."""
    unfinished: str
    """What the backend is asked for how many jobs are not yet acknowledged: SQL, in which %(count)s is how many there were;
    or Redis commands, one per line, whose numbers are added up."""
    python: tuple[str, ...] = ()
    """What pip installs into an environment of its own; nothing for those that run in this one."""
    node: tuple[str, ...] = ()
    """What npm installs, for those whose program is a .cjs file."""
    server: str = ""
    """The oldest version of the backend that it runs on, where ours may be older than that."""


RAW = "raw lease + delete"
OURS = "TaskHarbor"
"""The two that the others are compared with, by these names on every track."""
