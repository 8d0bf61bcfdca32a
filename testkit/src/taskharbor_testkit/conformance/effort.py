"""How hard the state machine tries: a little in every run, a lot when asked, and always reproducibly."""

from __future__ import annotations

import os
from typing import Any, Self

import msgspec

from taskharbor.errors import InvalidRequest

EXAMPLES = "TASKHARBOR_CONFORMANCE_EXAMPLES"
STEPS = "TASKHARBOR_CONFORMANCE_STEPS"
SEED = "TASKHARBOR_CONFORMANCE_SEED"
SHRINK = "TASKHARBOR_CONFORMANCE_SHRINK"

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    examples: int = 60
    """Histories to try."""
    steps: int = 40
    """Calls in each."""
    seed: int | None = None
    """None: the same histories in every run. A number: others, and the same ones for the same number."""

    shrink: bool = True
    """Whether to look for the shortest history once one failed; that takes longer than finding it, minutes perhaps.
    From the environment: on, except in CI, where a time-out would swallow what was found."""

    @classmethod
    def from_environment(cls, share: float = 1.0) -> Self:
        """`share`: the part of the usual histories to try, where the environment names no number."""
        given: dict[str, Any] = {
            field: _number(name)
            for field, name in (("examples", EXAMPLES), ("steps", STEPS), ("seed", SEED))
            if name in os.environ
        }
        is_ci = os.environ.get("CI", "").lower() not in _NO
        given["shrink"] = _switch(SHRINK) if SHRINK in os.environ else not is_ci
        return cls(**{"examples": max(1, round(cls().examples * share)), **given})

    def __str__(self) -> str:
        seed = "derandomized" if self.seed is None else f"{SEED}={self.seed}"
        text = f"{EXAMPLES}={self.examples} {STEPS}={self.steps} {seed}"
        return text if self.shrink else f"{text} (add {SHRINK}=1 for the shortest history)"


def _number(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"{name}={text!r} is not a whole number") from None


def _switch(name: str) -> bool:
    text = os.environ[name].lower()
    if text not in _YES + _NO:
        raise InvalidRequest(f"{name}={text!r} is neither 1 nor 0")
    return text in _YES
