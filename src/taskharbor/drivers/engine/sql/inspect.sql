-- name: columns
-- The fields of JobRecord that are columns, in their order, between the number and the spec.
SELECT jobs.seq, jobs.id, jobs.type, queues.name, coalesce(payload, (SELECT body FROM payloads WHERE payloads.seq = jobs.seq)),
    priority, run_at, created_at, job_key, max_attempts, max_stalls, state, attempts, stalls, fence, last_error,
    failed_at, finished_at, (SELECT body FROM results WHERE results.seq = jobs.seq), progress, cancel_requested,
    merged_into, token, worker, expires_at, reserved_at, spec
FROM json_each(?) AS wanted CROSS JOIN jobs

-- name: by_id
/*columns*/ ON jobs.id = wanted.value CROSS JOIN queues ON queues.id = jobs.queue_id

-- name: by_seq
/*columns*/ ON jobs.seq = wanted.value CROSS JOIN queues ON queues.id = jobs.queue_id

-- name: matching
seq < :before AND seq >= :until
    AND (:queue IS NULL OR queue_id = :queue)
    AND (:states IS NULL OR CASE WHEN state = 0 AND run_at <= :now THEN 1 ELSE state END IN (SELECT value FROM json_each(:states)))
    AND (:types IS NULL OR type IN (SELECT value FROM json_each(:types)))
    AND (:key IS NULL OR job_key = :key)
    AND (:worker IS NULL OR worker = :worker)
    AND (:finished_before IS NULL OR finished_at < :finished_before)
ORDER BY seq DESC LIMIT :limit

-- name: scan
-- Newest first past a cursor: right where matches are dense, which the counters tell beforehand.
SELECT seq FROM jobs WHERE /*matching*/

-- name: gather
-- Few jobs in the wanted states: fetch them by their states' indexes and sort.
SELECT seq FROM (
    SELECT seq FROM jobs INDEXED BY jobs_scheduled WHERE :scheduled AND queue_id = :queue AND state = 0
    UNION ALL
    SELECT seq FROM jobs INDEXED BY jobs_ready WHERE :ready AND queue_id = :queue AND state = 1
    UNION ALL
    SELECT seq FROM jobs INDEXED BY jobs_leases WHERE :inflight AND queue_id = :queue AND state = 3
    UNION ALL
    SELECT seq FROM jobs INDEXED BY jobs_ended
    WHERE queue_id = :queue AND finished_at IS NOT NULL AND state IN (SELECT value FROM json_each(:states))
) CROSS JOIN jobs USING (seq)
WHERE /*matching*/

-- name: counters
SELECT id, scheduled, ready, blocked, inflight, done, dead, cancelled FROM queues WHERE name = ?

-- name: stats
SELECT name, id, scheduled, ready, blocked, inflight, done, dead, cancelled, done_total, dead_total, cancelled_total,
    paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us, declaration
FROM queues WHERE :queue IS NULL OR name = :queue ORDER BY name

-- name: settings
SELECT paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us, declaration
FROM queues WHERE name = ?

-- name: due_scheduled
-- Per priority: the first scheduled job that is due but not promoted yet, and the number of such jobs.
WITH RECURSIVE wanted (id) AS (SELECT :queue), /*levels*/
SELECT json_group_array(json((
    SELECT json_array(-levels.priority, min(run_at), count(*)) FROM jobs INDEXED BY jobs_scheduled
    WHERE queue_id = :queue AND state = 0 AND priority = levels.priority AND run_at <= :now
)))
FROM levels WHERE priority IS NOT NULL

-- name: head_ready
SELECT -priority, run_at FROM jobs INDEXED BY jobs_ready
WHERE queue_id = ? AND state = 1 ORDER BY priority DESC, run_at, seq LIMIT 1

-- name: attempt_columns
SELECT attempts.seq, job_id, queues.name, type, job_key, priority, fence, worker, created_at, run_at, reserved_at,
    lease_expires_at, ended_at, outcome, attempts.state, error_type, error_message, payload_size

-- name: attempts
/*attempt_columns*/
FROM attempts CROSS JOIN queues ON queues.id = attempts.queue_id
WHERE attempts.seq > ? AND attempts.seq <= ? ORDER BY attempts.seq LIMIT ?

-- name: is_kept
SELECT 1 FROM jobs WHERE id = :id

-- name: job_attempts
/*attempt_columns*/
FROM attempts INDEXED BY attempts_job CROSS JOIN queues ON queues.id = attempts.queue_id
WHERE job_seq = (SELECT seq FROM jobs WHERE id = :id) AND job_id = :id ORDER BY attempts.seq

-- name: removed_job_attempts
-- The log outlives its jobs. Without the job there is no number to look for: this reads the whole log.
/*attempt_columns*/
FROM attempts CROSS JOIN queues ON queues.id = attempts.queue_id
WHERE job_id = :id ORDER BY attempts.seq

-- name: watch
-- Versions of the queues, and when the next scheduled job or lease of theirs comes due after :since.
WITH RECURSIVE wanted (id, name, stirred) AS (
    SELECT queues.id, name, stirred FROM json_each(:queues) AS given CROSS JOIN queues ON queues.name = given.value
),
/*levels*/
SELECT
    (SELECT json_group_array(json_array(name, stirred)) FROM wanted),
    (SELECT min((/*due*/)) FROM levels WHERE priority IS NOT NULL),
    (
        SELECT min((
            SELECT expires_at FROM jobs INDEXED BY jobs_leases
            WHERE queue_id = wanted.id AND state = 3 AND expires_at > :since ORDER BY expires_at LIMIT 1
        ))
        FROM wanted
    )
