-- name: create_rows
CREATE TABLE part.attempts (
    seq INTEGER PRIMARY KEY, job_id TEXT, type TEXT, job_key TEXT, priority INTEGER, fence INTEGER, worker TEXT,
    created_at INTEGER, run_at INTEGER, reserved_at INTEGER, lease_expires_at INTEGER, ended_at INTEGER, outcome INTEGER,
    state INTEGER, error_type TEXT, error_message TEXT, payload_size INTEGER
)

-- name: copy_rows
INSERT INTO part.attempts
SELECT seq, job_id, type, job_key, priority, fence, worker, created_at, run_at, reserved_at, lease_expires_at, ended_at,
    outcome, state, error_type, error_message, payload_size
FROM main.attempts ORDER BY seq

-- name: create_jobs
CREATE TABLE part.jobs (
    seq INTEGER PRIMARY KEY, id TEXT, type TEXT, payload BLOB, priority INTEGER, run_at INTEGER, created_at INTEGER,
    job_key TEXT, max_attempts INTEGER, max_stalls INTEGER, state INTEGER, attempts INTEGER, stalls INTEGER, fence INTEGER,
    last_error TEXT, failed_at INTEGER, finished_at INTEGER, result BLOB, merged_into TEXT, spec TEXT
)

-- name: copy_jobs
-- Dead jobs stay: they may be requeued.
INSERT INTO part.jobs
SELECT jobs.seq, id, type, coalesce(payload, payloads.body), priority, run_at, created_at, job_key, max_attempts, max_stalls,
    state, attempts, stalls, fence, last_error, failed_at, finished_at, results.body, merged_into, spec
FROM main.jobs LEFT JOIN main.payloads ON payloads.seq = jobs.seq LEFT JOIN main.results ON results.seq = jobs.seq
WHERE state IN (4, 6) ORDER BY jobs.seq

-- name: ended_numbers
SELECT json_group_array(seq) FROM main.jobs WHERE state IN (4, 6)

-- name: index_jobs
CREATE INDEX part.jobs_id ON jobs (id)

-- name: merge_rows
INSERT INTO part.attempts SELECT * FROM old.attempts WHERE (ended_at, seq) > (:rows_gone_at, :rows_gone_seq)

-- name: merge_jobs
INSERT INTO part.jobs SELECT * FROM old.jobs WHERE /*left*/

-- name: measure_rows
SELECT count(*), coalesce(min(seq), 0), coalesce(max(seq), 0), coalesce(min(job_id), ''), coalesce(max(job_id), ''),
    coalesce(min(ended_at), 0)
FROM part.attempts

-- name: measure_jobs
SELECT count(*), coalesce(min(seq), 0), coalesce(max(seq), 0), coalesce(min(id), ''), coalesce(max(id), ''),
    coalesce(min(finished_at), 0)
FROM part.jobs

-- name: jobs_left
(finished_at, seq) > (:jobs_gone_at, :jobs_gone_seq) AND seq NOT IN (SELECT value FROM json_each(:purged))

-- name: job_columns
SELECT seq, id, type, :queue, payload, priority, run_at, created_at, job_key, max_attempts, max_stalls, state, attempts,
    stalls, fence, last_error, failed_at, finished_at, result, NULL, 0, merged_into, NULL, NULL, NULL, NULL, spec
FROM jobs

-- name: row_columns
SELECT seq, job_id, :queue, type, job_key, priority, fence, worker, created_at, run_at, reserved_at, lease_expires_at,
    ended_at, outcome, state, error_type, error_message, payload_size
FROM attempts

-- name: by_id
/*columns*/ WHERE id IN (SELECT value FROM json_each(:ids)) AND /*left*/ ORDER BY seq

-- name: matching
/*columns*/
WHERE seq < :before AND seq >= :until
    AND (:states IS NULL OR state IN (SELECT value FROM json_each(:states)))
    AND (:types IS NULL OR type IN (SELECT value FROM json_each(:types)))
    AND (:key IS NULL OR job_key = :key)
    AND (:finished_before IS NULL OR finished_at < :finished_before)
    AND /*left*/
ORDER BY seq DESC LIMIT :limit

-- name: oldest_jobs
SELECT finished_at, seq, id, state FROM jobs WHERE /*left*/ ORDER BY finished_at, seq LIMIT :limit

-- name: oldest_rows
SELECT ended_at, seq FROM attempts
WHERE (ended_at, seq) > (:rows_gone_at, :rows_gone_seq) ORDER BY ended_at, seq LIMIT :limit

-- name: rows_between
/*columns*/
WHERE seq > :after AND seq <= :until AND (ended_at, seq) > (:rows_gone_at, :rows_gone_seq)
ORDER BY seq LIMIT :limit

-- name: rows_of
/*columns*/ WHERE job_id = :id AND (ended_at, seq) > (:rows_gone_at, :rows_gone_seq) ORDER BY seq

-- name: all
SELECT * FROM segments ORDER BY last_row, name

-- name: holding_jobs
SELECT * FROM segments WHERE jobs > 0 AND first_job_id <= :last AND last_job_id >= :first ORDER BY last_row, name

-- name: due
-- Those that retention takes something from, with the queue's number and what it takes: everything that ended by then.
SELECT segments.*, queues.id, :now - keep_done_us, :now - keep_attempts_us FROM segments, queues
WHERE (jobs > 0 AND oldest_job <= :now - keep_done_us) OR (rows > 0 AND oldest_row <= :now - keep_attempts_us)
ORDER BY last_row, segments.name

-- name: forget_keys
DELETE FROM idempotency WHERE job_id IN (SELECT value FROM json_each(?))

-- name: queue_number
SELECT id FROM queues

-- name: last_archived
SELECT coalesce(max(last_job), 0) FROM segments

-- name: put
INSERT OR REPLACE INTO segments VALUES /*rows: 20*/

-- name: drop
DELETE FROM segments WHERE name IN (SELECT value FROM json_each(?))
