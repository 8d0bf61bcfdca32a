"""How hard the state machine tries: a little in every run, a lot when asked, and always reproducibly."""

from __future__ import annotations

import os
from typing import Any, Self

import msgspec

from taskharbor.errors import InvalidRequest

EXAMPLES = "TASKHARBOR_CONFORMANCE_EXAMPLES"
STEPS = "TASKHARBOR_CONFORMANCE_STEPS"
SEED = "TASKHARBOR_CONFORMANCE_SEED"


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    examples: int = 60
    """Histories to try."""
    steps: int = 40
    """Calls in each."""
    seed: int | None = None
    """None: the same histories in every run. A number: others, and the same ones for the same number."""

    shrink: bool = True
    """Whether to look for the shortest history once one failed; that takes longer than finding it."""

    @classmethod
    def from_environment(cls) -> Self:
        given: dict[str, Any] = {
            field: _number(name)
            for field, name in (("examples", EXAMPLES), ("steps", STEPS), ("seed", SEED))
            if name in os.environ
        }
        return cls(**given)

    def __str__(self) -> str:
        seed = "derandomized" if self.seed is None else f"{SEED}={self.seed}"
        return f"{EXAMPLES}={self.examples} {STEPS}={self.steps} {seed}"


def _number(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"{name}={text!r} is not a whole number") from None
