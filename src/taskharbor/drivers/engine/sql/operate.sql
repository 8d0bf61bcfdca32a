-- name: configure
UPDATE queues
SET paused = ?, max_inflight = ?, failure_queue = ?, keep_done_us = ?, keep_dead_us = ?, keep_attempts_us = ?,
    declaration = ?, stirred = stirred + 1
WHERE id = ?

-- name: queues
SELECT json_group_array(id) FROM queues WHERE :name IS NULL OR name = :name

-- name: retention
SELECT json_group_array(json_array(id, keep_done_us, keep_dead_us, keep_attempts_us)) FROM queues

-- name: ended
-- Terminal jobs of one queue and state that match a filter, oldest end first.
SELECT json_group_array(seq) FROM (
    SELECT seq FROM jobs INDEXED BY jobs_ended
    WHERE queue_id = :queue AND state = :state AND finished_at < :before
        AND (:types IS NULL OR type IN (SELECT value FROM json_each(:types)))
        AND (:key IS NULL OR job_key = :key)
    ORDER BY finished_at LIMIT :limit
)

-- name: jobs
DELETE FROM jobs WHERE seq IN (SELECT value FROM json_each(?))

-- name: payloads
DELETE FROM payloads WHERE seq IN (SELECT value FROM json_each(?))

-- name: results
DELETE FROM results WHERE seq IN (SELECT value FROM json_each(?))

-- name: idempotency
DELETE FROM idempotency WHERE job_id IN (SELECT id FROM jobs WHERE seq IN (SELECT value FROM json_each(?)))

-- name: attempts
DELETE FROM attempts WHERE seq IN (
    SELECT seq FROM attempts INDEXED BY attempts_age WHERE queue_id = ? AND ended_at <= ? ORDER BY ended_at LIMIT ?
)
RETURNING seq

-- name: trimmed
UPDATE log_marks SET trimmed = max(trimmed, ?)
