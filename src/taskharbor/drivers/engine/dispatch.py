"""The functions that carry out the calls of the driver contract: those with the name of the call. Each takes a transaction and
the fields of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskharbor.drivers.engine import bulk, enqueue, inspect, operate, reserve, settle
from taskharbor.drivers.operations import OPERATIONS, Operation

FUNCTIONS: dict[type[Operation[Any]], Callable[..., Any]] = {
    call: vars(module)[name]
    for module in (enqueue, reserve, settle, operate, inspect, bulk)
    for name, call in OPERATIONS.items()
    if name in vars(module)
}
