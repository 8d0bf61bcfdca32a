-- name: probe
SELECT id, paused, max_inflight, scheduled, ready, inflight,
    EXISTS (
        SELECT 1 FROM jobs INDEXED BY jobs_leases
        WHERE queue_id = queues.id AND state = 3 AND expires_at <= ?2
    )
FROM queues WHERE name = ?1

-- name: valid_leases
SELECT count(*) FROM jobs INDEXED BY jobs_leases WHERE queue_id = ? AND state = 3 AND expires_at > ?

-- name: due_priorities
-- Which priorities have due scheduled jobs, highest first: one seek per distinct priority.
WITH RECURSIVE levels (priority) AS (
    SELECT (SELECT priority FROM jobs INDEXED BY jobs_scheduled WHERE queue_id = ?1 AND state = 0 ORDER BY priority DESC LIMIT 1)
    UNION ALL
    SELECT (
        SELECT priority FROM jobs INDEXED BY jobs_scheduled
        WHERE queue_id = ?1 AND state = 0 AND priority < levels.priority ORDER BY priority DESC LIMIT 1
    )
    FROM levels WHERE levels.priority IS NOT NULL
)
SELECT json_group_array(priority) FROM levels
WHERE priority IS NOT NULL AND EXISTS (
    SELECT 1 FROM jobs INDEXED BY jobs_scheduled
    WHERE queue_id = ?1 AND state = 0 AND priority = levels.priority AND run_at <= ?2
)

-- name: promote
UPDATE jobs SET state = 1
WHERE seq IN (
    SELECT seq FROM jobs INDEXED BY jobs_scheduled
    WHERE queue_id = ?1 AND state = 0 AND priority = ?2 AND run_at <= ?3
    ORDER BY run_at, seq LIMIT ?4
)

-- name: claimable
-- One row for the whole batch: SQLite hands over the GIL once per row, and a busy handler may keep it for 5 ms.
SELECT
    json_group_array(json_array(
        seq, id, type, run_at, created_at, priority, max_attempts, fence,
        CASE WHEN payload IS NULL THEN -payload_size ELSE payload_size END,
        CASE
            WHEN spec IS NULL AND job_key IS NULL AND last_error IS NULL AND attempts = 0 AND stalls = 0 AND max_stalls = 0
            THEN NULL
            ELSE json_array(job_key, attempts, stalls, max_stalls, failed_at, last_error, spec)
        END
    )),
    CAST(group_concat(payload, '') AS BLOB),
    json_group_array(seq)
FROM (
    SELECT seq, id, type, run_at, created_at, priority, max_attempts, fence, payload_size, payload,
        spec, job_key, last_error, attempts, stalls, max_stalls, failed_at
    FROM jobs INDEXED BY jobs_ready
    WHERE queue_id = ?1 AND state = 1
    ORDER BY priority DESC, run_at, seq LIMIT ?2
)

-- name: chosen
-- As `claimable`, for jobs chosen before, in the order given.
SELECT
    json_group_array(json_array(
        seq, id, type, run_at, created_at, priority, max_attempts, fence,
        CASE WHEN payload IS NULL THEN -payload_size ELSE payload_size END,
        json_array(job_key, attempts, stalls, max_stalls, failed_at, last_error, spec)
    )),
    CAST(group_concat(payload, '') AS BLOB),
    json_group_array(seq)
FROM (
    SELECT jobs.seq, jobs.id, jobs.type, run_at, created_at, priority, max_attempts, fence, payload_size, payload,
        spec, job_key, last_error, attempts, stalls, max_stalls, failed_at
    FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.seq = wanted.value
)

-- name: payload
SELECT body FROM payloads WHERE seq = ?

-- name: lease
UPDATE jobs SET state = 3, fence = fence + 1, token = ?2, worker = ?3, reserved_at = ?4, expires_at = ?5
WHERE seq IN (SELECT value FROM json_each(?1))

-- name: head_by_type
-- The first ?2 ready jobs and which of them have one of the types: how many were looked at, and the fitting ones.
SELECT count(*), json_group_array(seq) FILTER (WHERE type IN (SELECT value FROM json_each(?3)))
FROM (
    SELECT seq, type FROM jobs INDEXED BY jobs_ready
    WHERE queue_id = ?1 AND state = 1
    ORDER BY priority DESC, run_at, seq LIMIT ?2
)

-- name: ready_by_type
SELECT json_group_array(json_array(-priority, run_at, seq))
FROM (
    SELECT priority, run_at, seq FROM jobs INDEXED BY jobs_ready_type
    WHERE queue_id = ?1 AND state = 1 AND type = ?2
    ORDER BY priority DESC, run_at, seq LIMIT ?3
)

-- name: due_priorities_by_type
WITH RECURSIVE levels (priority) AS (
    SELECT (
        SELECT priority FROM jobs INDEXED BY jobs_scheduled_type
        WHERE queue_id = ?1 AND state = 0 AND type = ?3 ORDER BY priority DESC LIMIT 1
    )
    UNION ALL
    SELECT (
        SELECT priority FROM jobs INDEXED BY jobs_scheduled_type
        WHERE queue_id = ?1 AND state = 0 AND type = ?3 AND priority < levels.priority ORDER BY priority DESC LIMIT 1
    )
    FROM levels WHERE levels.priority IS NOT NULL
)
SELECT json_group_array(priority) FROM levels
WHERE priority IS NOT NULL AND EXISTS (
    SELECT 1 FROM jobs INDEXED BY jobs_scheduled_type
    WHERE queue_id = ?1 AND state = 0 AND type = ?3 AND priority = levels.priority AND run_at <= ?2
)

-- name: promote_by_type
UPDATE jobs SET state = 1
WHERE seq IN (
    SELECT seq FROM jobs INDEXED BY jobs_scheduled_type
    WHERE queue_id = ?1 AND state = 0 AND type = ?5 AND priority = ?2 AND run_at <= ?3
    ORDER BY run_at, seq LIMIT ?4
)

-- name: index_ready_by_type
-- Made at the first claim that needs it: a queue whose workers take every type never pays for it.
CREATE INDEX IF NOT EXISTS jobs_ready_type ON jobs (queue_id, type, priority DESC, run_at, seq) WHERE state = 1

-- name: index_scheduled_by_type
CREATE INDEX IF NOT EXISTS jobs_scheduled_type ON jobs (queue_id, type, priority DESC, run_at, seq) WHERE state = 0
