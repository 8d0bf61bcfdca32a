-- Leases of jobs with a key, each beside the one of those before it, of any job of its key, that was valid longest.
WITH leases AS (
    SELECT source, queue, key, job_id, fence, reserved_at, least(ended_at, lease_expires_at) AS until FROM {attempts}
    WHERE key IS NOT NULL AND reserved_at IS NOT NULL AND lease_expires_at IS NOT NULL
), beside AS (
    SELECT *, max(struct(until, job_id, fence, reserved_at)) OVER (
        PARTITION BY key, queue, source ORDER BY reserved_at, until, job_id, fence
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS held FROM leases
)
-- Another check handles two leases of the same job.
SELECT *, reserved_at < held.until AND held.job_id <> job_id AS key_held_twice FROM beside
