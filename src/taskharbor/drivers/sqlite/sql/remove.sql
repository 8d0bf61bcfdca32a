-- name: retention
SELECT json_group_array(json_array(id, keep_done_us, keep_dead_us, keep_attempts_us)) FROM queues

-- name: ended
-- Terminal jobs of one queue and state that match a filter, oldest end first.
SELECT json_group_array(seq) FROM (
    SELECT seq FROM jobs INDEXED BY jobs_ended
    WHERE queue_id = ?1 AND state = ?2 AND finished_at < ?3
        AND (?4 IS NULL OR type IN (SELECT value FROM json_each(?4)))
        AND (?5 IS NULL OR job_key = ?5)
    ORDER BY finished_at LIMIT ?6
)

-- name: jobs
DELETE FROM jobs WHERE seq IN (SELECT value FROM json_each(?))

-- name: payloads
DELETE FROM payloads WHERE seq IN (SELECT value FROM json_each(?))

-- name: results
DELETE FROM results WHERE seq IN (SELECT value FROM json_each(?))

-- name: idempotency
DELETE FROM idempotency WHERE job_seq IN (SELECT value FROM json_each(?))

-- name: attempts
DELETE FROM attempts WHERE seq IN (
    SELECT seq FROM attempts INDEXED BY attempts_age WHERE queue_id = ?1 AND ended_at <= ?2 ORDER BY ended_at LIMIT ?3
)
