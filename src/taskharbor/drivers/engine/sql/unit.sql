-- name: columns
-- The fields of `unit.JobRow`, in their order.
SELECT json_group_array(json_array(
    jobs.seq, jobs.id, queue_id, priority, run_at, created_at, max_attempts, max_stalls, jobs.type, job_key, spec,
    payload_size, state, expires_at, token, worker, reserved_at, fence, attempts, stalls, cancel_requested, finished_at,
    failed_at, last_error, merged_into
))
FROM json_each(?) AS wanted CROSS JOIN jobs

-- name: load
/*columns*/ ON jobs.id = wanted.value

-- name: load_waiting
/*columns*/ INDEXED BY jobs_waiting_key
WHERE queue_id = wanted.value ->> 0 AND job_key = wanted.value ->> 1 AND job_key IS NOT NULL AND state < 3

-- name: load_inflight
/*columns*/ INDEXED BY jobs_inflight_key
WHERE queue_id = wanted.value ->> 0 AND job_key = wanted.value ->> 1 AND job_key IS NOT NULL AND state = 3

-- name: queue
SELECT name, max_inflight, failure_queue FROM queues WHERE id = ?

-- name: payload
SELECT coalesce(payload, (SELECT body FROM payloads WHERE payloads.seq = jobs.seq)) FROM jobs WHERE seq = ?

-- name: move
WITH moved (
    seq, state, run_at, expires_at, token, worker, reserved_at, attempts, stalls, cancel_requested, finished_at,
    failed_at, last_error, merged_into
) AS (VALUES /*rows: 14*/)
UPDATE jobs
SET state = moved.state, run_at = moved.run_at, expires_at = moved.expires_at, token = moved.token,
    worker = moved.worker, reserved_at = moved.reserved_at, attempts = moved.attempts, stalls = moved.stalls,
    cancel_requested = moved.cancel_requested, finished_at = moved.finished_at, failed_at = moved.failed_at,
    last_error = moved.last_error, merged_into = moved.merged_into,
    progress = CASE WHEN moved.state = 3 THEN progress END
FROM moved WHERE jobs.seq = moved.seq

-- name: rewrite
UPDATE jobs
SET type = ?, spec = ?, priority = ?, max_attempts = ?, max_stalls = ?, payload_size = ?, payload = CASE WHEN ? THEN ? ELSE payload END
WHERE seq = ?

-- name: drop_payload
DELETE FROM payloads WHERE seq = ?

-- name: insert
INSERT INTO jobs (
    seq, queue_id, state, priority, run_at, created_at, max_attempts, max_stalls, id, type, job_key, spec, payload_size,
    payload
)
VALUES /*rows: 14*/

-- name: insert_result
INSERT OR REPLACE INTO results (seq, body) VALUES /*rows: 2*/

-- name: log
INSERT INTO attempts (
    job_id, queue_id, type, job_key, priority, fence, worker, created_at, run_at, reserved_at, lease_expires_at,
    payload_size, job_seq, ended_at, outcome, state, error_type, error_message
)
VALUES /*rows: 18*/
