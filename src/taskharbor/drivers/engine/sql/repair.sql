-- name: numbers
-- All jobs, each with whether its numbers are within bounds and its payload is there.
SELECT seq, attempts BETWEEN 0 AND 1000000 AND stalls BETWEEN 0 AND 1000000 AND fence BETWEEN 0 AND 1 << 53
    AND payload_size IS coalesce(length(payload), (SELECT length(body) FROM payloads WHERE payloads.seq = jobs.seq))
FROM jobs WHERE ? OR state <= 3

-- name: texts
-- As blobs: those that are no UTF-8 could not be read otherwise.
SELECT CAST(jobs.id AS BLOB), CAST(type AS BLOB), CAST(job_key AS BLOB), queues.name, state
FROM jobs LEFT JOIN queues ON queues.id = queue_id WHERE seq = ?

-- name: mend
UPDATE jobs
SET id = ?, type = ?, job_key = ?, spec = NULL, last_error = NULL, merged_into = NULL,
    worker = CASE WHEN state = 3 THEN 'damaged' END, token = CASE WHEN state = 3 THEN '' END,
    priority = max(-32767, min(priority, 32767)), run_at = max(0, min(run_at, (1 << 53) - 1)),
    created_at = max(0, min(created_at, (1 << 53) - 1)), max_attempts = max(0, min(max_attempts, 1000000)),
    max_stalls = max(0, min(max_stalls, 1000000)), attempts = max(0, min(attempts, 1000000)),
    stalls = max(0, min(stalls, 1000000)), fence = max(0, min(fence, 1 << 53)),
    payload = CASE WHEN EXISTS (SELECT 1 FROM payloads WHERE payloads.seq = jobs.seq) THEN payload ELSE coalesce(payload, x'') END,
    payload_size = coalesce(length(payload), (SELECT length(body) FROM payloads WHERE payloads.seq = jobs.seq), 0)
WHERE seq = ?

-- name: recount
-- ?1: jobs that have ended may be outside of this table, so their counters stay as they are.
UPDATE queues SET scheduled = a, ready = b, blocked = c, inflight = d, done = e, dead = f, cancelled = g FROM (
    SELECT queues.id AS own, sum(state IS 0) AS a, sum(state IS 1) AS b, sum(state IS 2) AS c, sum(state IS 3) AS d,
        iif(?1, done, sum(state IS 4)) AS e, iif(?1, dead, sum(state IS 5)) AS f, iif(?1, cancelled, sum(state IS 6)) AS g
    FROM queues LEFT JOIN jobs ON queue_id = queues.id GROUP BY queues.id
) WHERE own = queues.id AND (scheduled, ready, blocked, inflight, done, dead, cancelled) <> (a, b, c, d, e, f, g) RETURNING name
