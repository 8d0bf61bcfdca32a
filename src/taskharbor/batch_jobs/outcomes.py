"""What a batch handler returned, as one outcome per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from taskharbor.middleware import Raised


class OutcomesMismatch(TypeError):
    """The handler did not say what became of its rows: all of them count as failed."""


def per_row(returned: Any, count: int) -> list[Any]:
    """For every row its result, or `Raised` where it was an exception. None stands for: all done."""
    if returned is None:
        return [None] * count
    outcomes = _as_list(returned)
    if len(outcomes) != count:
        raise OutcomesMismatch(
            f"the handler returned {len(outcomes)} outcomes for {count} rows: return one for each, or None if all are done"
        )
    return [Raised(outcome) if isinstance(outcome, BaseException) else outcome for outcome in outcomes]


def _as_list(returned: Any) -> list[Any]:
    # Arrow's arrays and tables, then numpy's and pandas' own: values become Python's, so that they can be encoded.
    if hasattr(returned, "to_pylist"):
        return list(returned.to_pylist())
    if hasattr(returned, "to_dict") and hasattr(returned, "columns"):
        return list(returned.to_dict("records"))
    if hasattr(returned, "tolist"):
        values = returned.tolist()
        if isinstance(values, list):
            return values
    if isinstance(returned, (list, tuple)):
        return list(returned)
    kind = "a mapping" if isinstance(returned, Mapping) else f"a {type(returned).__name__}"
    raise OutcomesMismatch(
        f"the handler returned {kind}: return None if all rows are done, or a list, an array or a Series with one outcome each"
    )
