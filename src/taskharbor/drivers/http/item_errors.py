"""Errors of single items of a batch on the wire: told apart from the items, by their places, since there are hardly ever any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from taskharbor import errors
from taskharbor.errors import JobError

T = TypeVar("T")

_KINDS: dict[str, type[JobError]] = {
    kind.__name__: kind
    for kind in (
        errors.JobNotFound,
        errors.JobNotInflight,
        errors.LeaseMismatch,
        errors.LeaseExpired,
        errors.JobFinished,
        errors.JobNotDead,
        errors.KeyConflict,
        JobError,
    )
}


class ItemError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `JobError` in its item's place."""

    kind: str
    job_id: str
    detail: str = ""

    @classmethod
    def of(cls, error: JobError) -> ItemError:
        return cls(type(error).__name__, error.job_id, error.detail)

    def error(self) -> JobError:
        return _KINDS.get(self.kind, JobError)(self.job_id, self.detail)


def split_errors(items: Sequence[T | JobError]) -> tuple[list[T | None], dict[int, ItemError]]:
    """The items with a gap for each error, and the errors by their place."""
    refused = {n: ItemError.of(item) for n, item in enumerate(items) if isinstance(item, JobError)}
    return [None if isinstance(item, JobError) else item for item in items], refused


def join_errors(items: Sequence[T | None], refused: dict[int, ItemError]) -> list[T | JobError]:
    joined = cast("list[T | JobError]", list(items))  # Every gap is filled below.
    for place, error in refused.items():
        joined[place] = error.error()
    return joined
