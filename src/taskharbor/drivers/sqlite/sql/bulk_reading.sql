-- name: attempts
-- The numbers of a window, so that no read lasts long: while one does, the write-ahead log cannot be folded back.
SELECT attempts.seq, job_id, queues.name, type, job_key, priority, fence, worker, created_at, run_at, reserved_at,
    lease_expires_at, ended_at, outcome, attempts.state, error_type, error_message, payload_size
FROM attempts CROSS JOIN queues ON queues.id = attempts.queue_id
WHERE attempts.seq > :after AND attempts.seq <= :until
    AND (:queue IS NULL OR queues.name = :queue)
    AND (:type IS NULL OR type = :type)
    AND (:state IS NULL OR attempts.state = :state)
    AND (:since IS NULL OR ended_at >= :since)
    AND (:before IS NULL OR ended_at < :before)
ORDER BY attempts.seq

-- name: jobs
-- A scheduled job that is due reads as ready.
SELECT jobs.id, queues.name, type, CASE WHEN state = 0 AND run_at <= :now THEN 1 ELSE state END, job_key,
    json_extract(spec, '$.idempotency_key'), priority, run_at, created_at, attempts, stalls, fence, max_attempts, max_stalls,
    worker, reserved_at, expires_at, failed_at, finished_at, last_error, merged_into,
    coalesce(json_extract(spec, '$.codec'), 'json'), json_extract(spec, '$.headers'),
    coalesce(payload, (SELECT body FROM payloads WHERE payloads.seq = jobs.seq)),
    (SELECT body FROM results WHERE results.seq = jobs.seq)
FROM jobs CROSS JOIN queues ON queues.id = jobs.queue_id
WHERE jobs.seq > :after AND jobs.seq <= :until
    AND (:queue IS NULL OR queues.name = :queue)
    AND (:type IS NULL OR type = :type)
    AND (:state IS NULL OR CASE WHEN state = 0 AND run_at <= :now THEN 1 ELSE state END = :state)
    AND (:since IS NULL OR created_at >= :since)
    AND (:before IS NULL OR created_at < :before)
ORDER BY jobs.seq

-- name: range_of_attempts
SELECT (SELECT min(seq) FROM attempts), (SELECT max(seq) FROM attempts)

-- name: range_of_jobs
SELECT (SELECT min(seq) FROM jobs), (SELECT max(seq) FROM jobs)

-- name: highest
-- The number of the last row ever written, whether it is still there or not.
SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'attempts'

-- name: around
-- Whether the row of a cursor is there, and the number of the next one.
SELECT EXISTS (SELECT 1 FROM attempts WHERE seq = :after), (SELECT min(seq) FROM attempts WHERE seq > :after)

-- name: limited
SELECT max(seq) FROM (SELECT seq FROM attempts WHERE seq > :after AND seq <= :until ORDER BY seq LIMIT :limit)
