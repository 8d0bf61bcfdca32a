-- name: log
SELECT store_id, trimmed, coalesce((SELECT max(seq) FROM sqlite_sequence WHERE name = 'attempts'), 0) FROM log_marks

-- name: range_of_jobs
SELECT coalesce((SELECT min(seq) FROM jobs), 1), coalesce((SELECT max(seq) FROM jobs), 0)

-- name: find
SELECT json_group_array(json_array(jobs.id, jobs.seq, jobs.queue_id, jobs.state))
FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.id = wanted.value

-- name: put
INSERT INTO blobs (name, data) VALUES (:name, :data) ON CONFLICT (name) DO UPDATE SET data = excluded.data

-- name: create
INSERT INTO blobs (name, data) VALUES (:name, :data) ON CONFLICT (name) DO NOTHING

-- name: replace
UPDATE blobs SET data = :data WHERE name = :name AND data = :expected

-- name: blob
SELECT data FROM blobs WHERE name = ?

-- name: names
SELECT name FROM blobs WHERE name > ?1 || '/' AND name < ?1 || '0' ORDER BY name

-- name: drop
DELETE FROM blobs WHERE name IN (SELECT value FROM json_each(?))

-- name: portion
SELECT number, portion, added FROM portions WHERE series = ?

-- name: note
INSERT INTO portions (series, number, portion, added, noted_at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (series) DO UPDATE
SET number = excluded.number, portion = excluded.portion, added = excluded.added, noted_at = excluded.noted_at

-- name: forget_notes
DELETE FROM portions WHERE noted_at < CASE WHEN number < 0 THEN ? ELSE ? END
