-- name: check_acks
-- Everything that makes a batch of acks valid, in one row; ids and tokens come back joined, in the order given.
SELECT count(*), min(state), max(state), min(expires_at), count(jobs.job_key), min(queue_id), max(queue_id),
    max(reserved_at), group_concat(jobs.id, char(10)), group_concat(token, char(10))
FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.seq = wanted.value

-- name: queues_of
SELECT json_group_array(queue_id) FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.seq = wanted.value

-- name: log_acks
INSERT INTO attempts (
    job_id, queue_id, type, job_key, priority, fence, worker, created_at, run_at, reserved_at, lease_expires_at,
    ended_at, outcome, state, payload_size, job_seq
)
SELECT jobs.id, queue_id, jobs.type, job_key, priority, fence, worker, created_at, run_at, reserved_at, expires_at,
    ?, 0, 4, payload_size, jobs.seq
FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.seq = wanted.value

-- name: finish_acks
UPDATE jobs
SET state = 4, finished_at = ?, expires_at = NULL, token = NULL, worker = NULL, reserved_at = NULL,
    cancel_requested = 0, progress = NULL
WHERE seq IN (SELECT value FROM json_each(?))

-- name: count_acks
UPDATE queues
SET inflight = inflight - ?, done = done + ?, done_total = done_total + ?,
    stirred = stirred + (max_inflight IS NOT NULL), latest_end = max(latest_end, ?)
WHERE id = ?
RETURNING max_inflight

-- name: leases
SELECT json_group_array(json_array(jobs.seq, jobs.id, state, token, expires_at, cancel_requested))
FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.id = wanted.value

-- name: extend
UPDATE jobs SET expires_at = max(expires_at, ?) WHERE seq IN (SELECT value FROM json_each(?))

-- name: set_progress
UPDATE jobs SET progress = ? WHERE seq = ?

-- name: queues_with_leases
-- A sweep of a store with thousands of queues looks only into these.
SELECT json_group_array(id) FROM queues WHERE inflight > 0 AND (:name IS NULL OR name = :name)

-- name: expired
SELECT json_group_array(id) FROM (
    SELECT id FROM jobs INDEXED BY jobs_leases
    WHERE queue_id = ? AND state = 3 AND expires_at <= ?
    ORDER BY expires_at LIMIT ?
)
