"""The functions that carry out the calls of the driver contract, by call. Each takes a transaction and the fields of the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskharbor.drivers import operations as op
from taskharbor.drivers.engine import bulk, enqueue, inspect, operate, reserve, settle, tables

FUNCTIONS: dict[type[op.Operation[Any]], Callable[..., Any]] = {
    op.Enqueue: enqueue.enqueue,
    op.Reserve: reserve.reserve,
    op.ExtendLease: settle.extend_lease,
    op.Settle: settle.settle,
    op.Reclaim: settle.reclaim,
    op.Cancel: operate.cancel,
    op.Requeue: operate.requeue,
    op.Purge: operate.purge,
    op.Prune: operate.prune,
    op.Configure: lambda tx, queue, settings, now: tables.configure(tx, queue, settings),
    op.Settings: tables.settings_of,
    op.Get: inspect.get,
    op.ListJobs: inspect.list_jobs,
    op.Stats: inspect.stats,
    op.ReadAttempts: inspect.read_attempts,
    op.JobAttempts: inspect.job_attempts,
    op.LogStreams: bulk.log_streams,
    op.ReadLog: bulk.read_log,
    op.SplitJobs: bulk.split_jobs,
    op.Remove: bulk.remove,
    op.PutBlob: bulk.put_blob,
    op.ReadBlobs: bulk.read_blobs,
    op.ListBlobs: bulk.list_blobs,
    op.DropBlobs: bulk.drop_blobs,
    op.PublishBlobs: lambda tx, *fields: bulk.publish_blobs(tx, op.PublishBlobs(*fields)),
}
