-- name: stage
INSERT OR REPLACE INTO staged (write, task, number, staged_at, chunk)
SELECT ?, ?, ?, ?, ? WHERE NOT EXISTS (SELECT 1 FROM published WHERE series = ? AND number >= ?)

-- name: published
SELECT number, jobs FROM published WHERE series = ?

-- name: mark
INSERT INTO published (series, number, published_at, jobs) VALUES (?, ?, ?, ?)
ON CONFLICT (series) DO UPDATE
SET number = excluded.number, published_at = excluded.published_at, jobs = excluded.jobs
WHERE published.number < excluded.number

-- name: complete_tasks
SELECT task FROM staged WHERE write = ? GROUP BY task HAVING max(CASE WHEN chunk IS NULL THEN number END) = count(*) - 1

-- name: chunks
SELECT chunk FROM staged WHERE write = ? AND task = ? AND chunk IS NOT NULL ORDER BY number

-- name: forget
DELETE FROM staged WHERE write = ?

-- name: forget_old_staged
DELETE FROM staged WHERE write IN (SELECT write FROM staged GROUP BY write HAVING max(staged_at) < ?)

-- name: forget_old_published
DELETE FROM published WHERE published_at < CASE WHEN number < 0 THEN ? ELSE ? END

-- name: find
SELECT json_group_array(json_array(jobs.id, jobs.seq, jobs.queue_id, jobs.state))
FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.id = wanted.value
