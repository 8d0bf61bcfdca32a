"""Vectorised handlers: a batch of jobs as one Arrow table or pandas frame, one call, an outcome for every row.

`declare` is `@harbor.batch_job`; `rows` makes a table of payloads and outcomes of what a handler returned, with `columns` for
Arrow. The worker runs batches (`taskharbor.worker.batches`).
"""

from taskharbor.middleware import Batch, current_batch

__all__ = ["Batch", "current_batch"]
