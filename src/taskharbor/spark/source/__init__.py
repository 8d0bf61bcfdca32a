"""The Spark data source `taskharbor`: `spark.read`, `spark.readStream`, `df.write` and `df.writeStream` on any store.

datasource  what Spark looks for and asks first
options     what a reader was told
reading     a table as it is now
streaming   the attempt log as it grows
writing     rows that become jobs
"""

from __future__ import annotations

from taskharbor.spark.source.datasource import TaskHarborDataSource

__all__ = ["TaskHarborDataSource"]
