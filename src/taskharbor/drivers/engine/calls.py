"""The functions that carry out the calls of the driver contract, by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskharbor.drivers import operations as op
from taskharbor.drivers.engine import bulk, enqueue, inspect, operate, reserve, settle, tables
from taskharbor.drivers.engine.tables import Transaction

FUNCTIONS: dict[type[op.Operation[Any]], Callable[[Transaction, Any], Any]] = {
    op.Enqueue: op.by_fields(enqueue.enqueue),
    op.Reserve: op.by_fields(reserve.reserve),
    op.ExtendLease: op.by_fields(settle.extend_lease),
    op.Settle: op.by_fields(settle.settle),
    op.Reclaim: op.by_fields(settle.reclaim),
    op.Cancel: op.by_fields(operate.cancel),
    op.Requeue: op.by_fields(operate.requeue),
    op.Purge: op.by_fields(operate.purge),
    op.Prune: op.by_fields(operate.prune),
    op.Configure: lambda tx, call: tables.configure(tx, call.queue, call.settings),
    op.Settings: op.by_fields(tables.settings_of),
    op.Get: op.by_fields(inspect.get),
    op.ListJobs: op.by_fields(inspect.list_jobs),
    op.Stats: op.by_fields(inspect.stats),
    op.ReadAttempts: op.by_fields(inspect.read_attempts),
    op.JobAttempts: op.by_fields(inspect.job_attempts),
    op.LogStreams: op.by_fields(bulk.log_streams),
    op.ReadLog: bulk.read_log,
    op.SplitJobs: bulk.split_jobs,
    op.Remove: op.by_fields(bulk.remove),
    op.PutBlob: bulk.put_blob,
    op.ReadBlobs: op.by_fields(bulk.read_blobs),
    op.ListBlobs: op.by_fields(bulk.list_blobs),
    op.DropBlobs: op.by_fields(bulk.drop_blobs),
    op.PublishBlobs: bulk.publish_blobs,
}
