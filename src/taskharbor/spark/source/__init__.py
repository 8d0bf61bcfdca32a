"""The Spark data source `taskharbor`: `spark.read`, `spark.readStream`, `df.write` and `df.writeStream` on any store.

datasource  the entry, its options, a table as it is now, the attempt log as it grows
writing     rows that become jobs, or name jobs to requeue, cancel or purge
requests    which column of a row is what field of a job, and how its payload is made
"""

from __future__ import annotations

from taskharbor.spark.source.datasource import TaskHarborDataSource

__all__ = ["TaskHarborDataSource"]
