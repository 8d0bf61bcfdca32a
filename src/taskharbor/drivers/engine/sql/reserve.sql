-- name: probe
SELECT id, paused, max_inflight, scheduled, ready, inflight, latest_end,
    EXISTS (
        SELECT 1 FROM jobs INDEXED BY jobs_leases
        WHERE queue_id = queues.id AND state = 3 AND expires_at <= ?
    )
FROM queues WHERE name = ?

-- name: valid_leases
SELECT count(*) FROM jobs INDEXED BY jobs_leases WHERE queue_id = ? AND state = 3 AND expires_at > ?

-- name: due_priorities
-- Which priorities have due scheduled jobs, highest first.
WITH RECURSIVE wanted (id) AS (SELECT :queue), /*levels*/
SELECT json_group_array(priority) FROM levels
WHERE priority IS NOT NULL AND EXISTS (
    SELECT 1 FROM jobs INDEXED BY jobs_scheduled
    WHERE queue_id = :queue AND state = 0 AND priority = levels.priority AND run_at <= :now
)

-- name: promote
UPDATE jobs SET state = 1
WHERE seq IN (
    SELECT seq FROM jobs INDEXED BY jobs_scheduled
    WHERE queue_id = :queue AND state = 0 AND priority = :priority AND run_at <= :now
    ORDER BY run_at, seq LIMIT :limit
)

-- name: leased_rows
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
    SELECT jobs.seq, jobs.id, jobs.type, run_at, created_at, priority, max_attempts, fence, payload_size, payload,
        spec, job_key, last_error, attempts, stalls, max_stalls, failed_at
    FROM /*jobs*/
)

-- name: first_of_any_type
jobs INDEXED BY jobs_ready
WHERE queue_id = ? AND state = 1
ORDER BY priority DESC, run_at, seq LIMIT ?

-- name: first_of_one_type
jobs INDEXED BY jobs_ready_type
WHERE queue_id = ? AND state = 1 AND type = ?
ORDER BY priority DESC, run_at, seq LIMIT ?

-- name: chosen
json_each(?) AS wanted CROSS JOIN jobs ON jobs.seq = wanted.value

-- name: payload
SELECT body FROM payloads WHERE seq = ?

-- name: lease
UPDATE jobs SET state = 3, fence = fence + 1, token = ?, worker = ?, reserved_at = ?, expires_at = ?
WHERE seq IN (SELECT value FROM json_each(?))

-- name: put_back
UPDATE jobs SET state = 0
WHERE seq IN (
    SELECT seq FROM jobs INDEXED BY jobs_ready WHERE queue_id = ? AND state = 1 AND priority = ? AND run_at > ?
)

-- name: ready_types
SELECT json_group_array(json_array(seq, type))
FROM (
    SELECT seq, type FROM jobs INDEXED BY jobs_ready
    WHERE queue_id = ? AND state = 1 ORDER BY priority DESC, run_at, seq
)

-- name: first_types
-- The types whose first jobs come first, at most `limit` of them: one seek per type.
SELECT json_group_array(type)
FROM (
    SELECT jobs.type FROM json_each(:types) AS wanted CROSS JOIN jobs ON jobs.seq = (
        SELECT seq FROM jobs INDEXED BY jobs_ready_type
        WHERE queue_id = :queue AND state = 1 AND type = wanted.value
        ORDER BY priority DESC, run_at, seq LIMIT 1
    )
    ORDER BY priority DESC, run_at, jobs.seq LIMIT :limit
)

-- name: first_by_type
-- Of each type the places of its first ready jobs: one seek per type, one statement for all of them.
SELECT json_group_array(json((
    SELECT json_group_array(json_array(-priority, run_at, seq))
    FROM (
        SELECT priority, run_at, seq FROM jobs INDEXED BY jobs_ready_type
        WHERE queue_id = :queue AND state = 1 AND type = wanted.value
        ORDER BY priority DESC, run_at, seq LIMIT :limit
    )
)))
FROM json_each(:types) AS wanted

-- name: scheduled_types
SELECT json_group_array(value) FROM json_each(:types) AS wanted
WHERE EXISTS (
    SELECT 1 FROM jobs INDEXED BY jobs_scheduled_type
    WHERE queue_id = :queue AND state = 0 AND type = wanted.value
)
