"""Spark looks for a data source `taskharbor` in a module of this name, so nobody has to register it."""

from __future__ import annotations

from taskharbor.spark.source import TaskHarborDataSource as DefaultSource

__all__ = ["DefaultSource"]
