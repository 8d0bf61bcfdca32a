"""The functions that carry out the calls of the driver contract: those with the name of the call. Each takes a transaction and
the fields of the call."""

from __future__ import annotations

from taskharbor.drivers.engine import bulk, enqueue, inspect, operate, reserve, settle
from taskharbor.drivers.validation import functions_of

FUNCTIONS = functions_of(enqueue, reserve, settle, operate, inspect, bulk)
