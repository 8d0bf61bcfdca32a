-- name: is_full
-- True if enough rows or jobs could move to a segment, or, in a large enough image, enough bytes.
WITH ended AS NOT MATERIALIZED (
    SELECT seq, payload_size FROM jobs INDEXED BY jobs_ended WHERE finished_at IS NOT NULL AND state IN (4, 6)
)
SELECT CASE
    WHEN max((SELECT count(*) FROM attempts), (SELECT count(*) FROM ended)) >= :rows THEN 1
    WHEN NOT :is_large THEN 0
    ELSE (SELECT count(*) * 150 FROM attempts) + coalesce((
        SELECT sum(250 + payload_size + coalesce(length(results.body), 0)) FROM ended LEFT JOIN results USING (seq)
    ), 0) >= :bytes
END

-- name: busy
SELECT 1 FROM loose_segments WHERE is_begun AND since > ? AND since < ?

-- name: overdue
SELECT name FROM loose_segments WHERE CASE WHEN is_begun THEN since <= ?1 ELSE since <= ?2 END

-- name: begin
INSERT INTO loose_segments (name, is_begun, since) VALUES (?, 1, ?)

-- name: end
DELETE FROM loose_segments WHERE name = ? AND is_begun

-- name: abandon
-- These segments never become part of the queue, even if their writers still work. Nobody reads them, so they are removed at once.
UPDATE loose_segments SET is_begun = 0, since = 0 WHERE is_begun AND name IN (SELECT value FROM json_each(?))

-- name: forget
DELETE FROM loose_segments WHERE name IN (SELECT value FROM json_each(?))

-- name: ended_numbers
SELECT json_group_array(seq) FROM jobs WHERE state IN (4, 6)

-- name: taken
-- The number of a segment's rows and jobs that are still here. Ended jobs and rows never change.
SELECT (SELECT count(*) FROM attempts WHERE seq <= ?),
    (SELECT count(*) FROM jobs WHERE state IN (4, 6) AND seq IN (SELECT value FROM json_each(?)))

-- name: remove_rows
DELETE FROM attempts WHERE seq <= ?
