"""Vectorised handlers: a batch of jobs as one Arrow table or pandas frame, one call, an outcome for every row.

Declared with `@harbor.batch_job` (`declare`), run by `taskharbor.worker.batches`.
"""

from taskharbor.batch_jobs.batch import Batch, current_batch

__all__ = ["Batch", "current_batch"]
