"""Jobs, attempts and queues as JSON documents. Lease tokens stay inside: whoever holds one can settle the job."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from taskharbor.cli.values import iso_text
from taskharbor.codec import CodecRegistry
from taskharbor.drivers.contract import QueueSettings, QueueStats
from taskharbor.errors import CodecError
from taskharbor.jobs import SECOND, Attempt, JobRecord, Micros

_CODECS = CodecRegistry()


def job_document(job: JobRecord, *, payload: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": job.id,
        "type": job.type,
        "queue": job.queue,
        "state": job.state,
        "priority": job.priority,
        "created_at": iso_text(job.created_at_us),
        "run_at": iso_text(job.run_at_us),
        "finished_at": iso_text(job.finished_at_us),
        "attempts": job.attempts,
        "stalls": job.stalls,
        "max_attempts": job.max_attempts,
        "max_stalls": job.max_stalls,
        "timeout": job.timeout_us / SECOND if job.timeout_us else None,
        "backoff": [job.backoff_min_us / SECOND, job.backoff_max_us / SECOND],
        "key": job.key,
        "idempotency_key": job.idempotency_key,
        "headers": job.headers,
        "codec": job.codec,
        "payload_bytes": len(job.payload),
        "fence": job.fence,
        "lease": lease_document(job),
        "cancel_requested": job.cancel_requested,
        "merged_into": job.merged_into,
        "last_error": job.last_error,
        "failed_at": iso_text(job.failed_at_us),
        "progress": None if job.progress is None else msgspec.json.decode(job.progress),
    }
    if payload:
        document["payload"] = decoded(job.codec, job.payload)
        document["result"] = None if job.result is None else decoded(job.codec, job.result)
    return document


def lease_document(job: JobRecord) -> dict[str, Any] | None:
    if job.lease is None:
        return None
    return {
        "worker": job.worker,
        "reserved_at": iso_text(job.reserved_at_us),
        "expires_at": iso_text(job.expires_at_us),
    }


def decoded(codec: str, data: bytes) -> Any:
    """What the bytes say, or the bytes themselves in base64 where this process cannot read or JSON cannot hold them."""
    try:
        value = _CODECS.get(codec).decode(data)
        msgspec.json.encode(value)
    except (CodecError, TypeError, ValueError):
        return {"base64": base64.b64encode(data).decode()}
    return value


def attempt_document(attempt: Attempt) -> dict[str, Any]:
    return {
        "fence": attempt.fence,
        "outcome": attempt.outcome,
        "state": attempt.state,
        "worker": attempt.worker,
        "run_at": iso_text(attempt.run_at_us),
        "reserved_at": iso_text(attempt.reserved_at_us),
        "lease_expires_at": iso_text(attempt.lease_expires_at_us),
        "ended_at": iso_text(attempt.ended_at_us),
        "error_type": attempt.error_type,
        "error_message": attempt.error_message,
    }


def settings_document(settings: QueueSettings) -> dict[str, Any]:
    return {
        "paused": settings.paused,
        "max_inflight": settings.max_inflight,
        "failure_queue": settings.failure_queue,
        "keep_done": _seconds(settings.keep_done_us),
        "keep_dead": _seconds(settings.keep_dead_us),
        "keep_attempts": _seconds(settings.keep_attempts_us),
    }


def stats_document(stats: QueueStats, now: Micros) -> dict[str, Any]:
    return {
        "queue": stats.queue,
        "counts": {str(state): count for state, count in stats.counts.items()},
        "done_total": stats.done_total,
        "dead_total": stats.dead_total,
        "cancelled_total": stats.cancelled_total,
        "lag": None if stats.head_run_at_us is None else max(0, now - stats.head_run_at_us) / SECOND,
        **settings_document(stats.settings),
    }


def _seconds(kept: Micros | None) -> float | None:
    return None if kept is None else kept / SECOND
