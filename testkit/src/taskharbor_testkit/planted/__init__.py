"""Deliberately broken drivers: the test of the tests.

A conformance kit that passes everything is worth nothing, so each of these breaks one rule of the contract, as a driver's
author might, and the kit must catch every one. They are overrides of single steps of the memory store, which is
why that store has a method per rule.
"""

from taskharbor_testkit.planted import enqueueing, history, keyed, leasing, operating, order, settling
from taskharbor_testkit.planted.registry import PLANTED, RULES

__all__ = [
    "PLANTED",
    "RULES",
    "enqueueing",
    "history",
    "keyed",
    "leasing",
    "operating",
    "order",
    "settling",
]
