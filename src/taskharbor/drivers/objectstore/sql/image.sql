-- name: number_rows
-- Later rows of the log get numbers above this one.
UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'attempts'

-- name: add_notice
INSERT INTO outbox (id, record) VALUES (?, ?)

-- name: notices
SELECT record FROM outbox ORDER BY rowid

-- name: remove_notices
DELETE FROM outbox WHERE id IN (SELECT value FROM json_each(?))

-- name: news
SELECT coalesce(sum(stirred), 0), EXISTS (SELECT 1 FROM outbox),
    EXISTS (SELECT 1 FROM attempts) OR EXISTS (SELECT 1 FROM segments) OR EXISTS (SELECT 1 FROM loose_segments)
    OR EXISTS (SELECT 1 FROM jobs INDEXED BY jobs_ended WHERE finished_at IS NOT NULL)
FROM queues

-- name: queues
SELECT name FROM queues

-- name: pages
SELECT freelist_count, page_count FROM pragma_freelist_count, pragma_page_count

-- name: known_ids
SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(?))

-- name: log_marks
-- The numbers of the last row and of the last row that retention removed.
SELECT max(
    coalesce((SELECT max(seq) FROM attempts), 0), coalesce((SELECT max(last_row) FROM segments), 0), trimmed
), trimmed FROM log_marks

-- name: has_work
SELECT 1 FROM queues
WHERE ready > 0
    OR EXISTS (SELECT 1 FROM jobs INDEXED BY jobs_scheduled WHERE queue_id = queues.id AND state = 0 AND run_at <= :now)
    OR EXISTS (SELECT 1 FROM jobs INDEXED BY jobs_leases WHERE queue_id = queues.id AND state = 3 AND expires_at <= :now)

-- name: job_numbers
SELECT seq FROM jobs

-- name: entries
SELECT entry FROM segments ORDER BY last_row, name

-- name: put
INSERT OR REPLACE INTO segments VALUES (?, ?, ?)

-- name: drop
DELETE FROM segments WHERE name IN (SELECT value FROM json_each(?))

-- name: retire
INSERT INTO loose_segments (name, is_begun, since) VALUES (?, 0, ?)
