"""Batch handlers: many jobs as one Arrow table or pandas frame, in one call, with an outcome for every row.

- `declare`: `@harbor.batch_job`, its options, and the handler made of them.
- `rows`: payloads become a table, and the handler's return value becomes outcomes.
- `columns`: the columns of that table, for Arrow.

The worker runs batches in `taskharbor.worker.batches`.
"""

from taskharbor.middleware import Batch, current_batch

__all__ = ["Batch", "current_batch"]
