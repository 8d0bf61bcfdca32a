-- The databases of a segment have the engine's tables: one has rows of the log, the other ended jobs.

-- name: indexes
-- A segment needs one: jobs are looked for by id.
SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND name <> 'jobs_id'

-- name: copy_queues
INSERT OR REPLACE INTO part.queues SELECT * FROM queues

-- name: copy_attempts
INSERT INTO part.attempts SELECT * FROM attempts ORDER BY seq

-- name: copy_jobs
-- Dead jobs stay: they may be requeued. Of an id that was accepted anew, the later job counts.
INSERT OR REPLACE INTO part.jobs SELECT * FROM jobs WHERE state IN (4, 6) ORDER BY seq

-- name: copy_payloads
INSERT OR REPLACE INTO part.payloads SELECT * FROM payloads WHERE seq IN (SELECT seq FROM part.jobs)

-- name: copy_results
INSERT OR REPLACE INTO part.results SELECT * FROM results WHERE seq IN (SELECT seq FROM part.jobs)

-- name: measure_rows
SELECT count(*), coalesce(min(seq), 0), coalesce(max(seq), 0), coalesce(min(job_id), ''), coalesce(max(job_id), ''),
    coalesce(min(ended_at), 0)
FROM attempts

-- name: measure_jobs
SELECT count(*), coalesce(min(seq), 0), coalesce(max(seq), 0), coalesce(min(id), ''), coalesce(max(id), ''),
    coalesce(min(finished_at), 0)
FROM jobs

-- name: marks
CREATE TEMP TABLE marks AS SELECT 0 AS gone_at, 0 AS gone_seq, '[]' AS purged

-- name: set_marks
UPDATE marks SET gone_at = ?, gone_seq = ?, purged = ?

-- name: view_of_rows
-- Hides the rows that retention has removed.
CREATE TEMP VIEW attempts AS
SELECT * FROM main.attempts WHERE (ended_at, seq) > (SELECT gone_at, gone_seq FROM marks)

-- name: view_of_jobs
CREATE TEMP VIEW jobs AS
SELECT * FROM main.jobs
WHERE (finished_at, seq) > (SELECT gone_at, gone_seq FROM marks)
    AND seq NOT IN (SELECT value FROM json_each((SELECT purged FROM marks)))

-- name: oldest_jobs
SELECT finished_at, seq, id, state FROM jobs ORDER BY finished_at, seq LIMIT ?

-- name: oldest_rows
SELECT ended_at, seq FROM attempts ORDER BY ended_at, seq LIMIT ?

-- name: retention
-- Jobs and rows of the log that ended by these instants are due for removal.
SELECT coalesce(:now - keep_done_us, :always), coalesce(:now - keep_attempts_us, :always) FROM queues

-- name: forget_keys
DELETE FROM idempotency WHERE job_id IN (SELECT value FROM json_each(?))

-- name: queue_number
SELECT id FROM queues
