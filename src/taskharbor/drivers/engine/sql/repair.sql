-- name: rows
-- Texts as blobs: those that are no UTF-8 could not be read otherwise.
SELECT jobs.seq, CAST(queues.name AS BLOB), state, CAST(jobs.id AS BLOB), CAST(type AS BLOB), CAST(job_key AS BLOB), CAST(spec AS BLOB),
    CAST(worker AS BLOB), CAST(token AS BLOB), CAST(last_error AS BLOB), CAST(merged_into AS BLOB), priority, run_at, created_at,
    max_attempts, max_stalls, attempts, stalls, fence, expires_at, reserved_at, finished_at, failed_at, payload_size,
    coalesce(length(payload), (SELECT length(body) FROM payloads WHERE payloads.seq = jobs.seq))
FROM jobs JOIN queues ON queues.id = jobs.queue_id
WHERE ? OR state <= 3

-- name: mend
UPDATE jobs
SET id = ?, type = ?, job_key = ?, spec = ?, worker = ?, token = ?, last_error = ?, merged_into = ?, priority = ?, run_at = ?,
    created_at = ?, max_attempts = ?, max_stalls = ?, attempts = ?, stalls = ?, fence = ?, expires_at = ?, reserved_at = ?,
    finished_at = ?, failed_at = ?, payload_size = ?, payload = CASE WHEN ? THEN payload ELSE x'' END
WHERE seq = ?
