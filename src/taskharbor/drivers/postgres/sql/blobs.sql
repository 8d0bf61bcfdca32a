-- name: put
INSERT INTO $schema.blobs (name, data) VALUES (%s, %b::bytea) ON CONFLICT (name) DO UPDATE SET data = excluded.data RETURNING true

-- name: create
INSERT INTO $schema.blobs (name, data) VALUES (%s, %b::bytea) ON CONFLICT (name) DO NOTHING RETURNING true

-- name: replace
UPDATE $schema.blobs SET data = %b::bytea WHERE name = %s AND data = %b::bytea RETURNING true

-- name: read
SELECT b.data FROM unnest(%s::text[]) WITH ORDINALITY AS n(name, at) LEFT JOIN $schema.blobs AS b ON b.name = n.name ORDER BY n.at

-- name: names
SELECT name FROM $schema.blobs WHERE starts_with(name, %s) ORDER BY name

-- name: drop
DELETE FROM $schema.blobs WHERE name = ANY (%s::text[]) RETURNING true

-- name: lock_series
SELECT pg_advisory_xact_lock($schema.write_lock(%s))

-- name: portion
SELECT number, portion, added FROM $schema.portions WHERE series = %s

-- name: note
INSERT INTO $schema.portions (series, number, portion, added) VALUES (%s, %s::bigint, %s::integer, %s::bigint)
ON CONFLICT (series) DO UPDATE
SET number = excluded.number, portion = excluded.portion, added = excluded.added, noted_at = excluded.noted_at RETURNING true

-- name: streams
SELECT epoch, last_seq, system_id, trimmed_xid::text::bigint FROM $schema.epochs ORDER BY epoch

-- name: end_of_log
-- The last transaction of which all rows can be seen: below the oldest one that still runs nothing can appear any more.
SELECT coalesce((
    SELECT a.xid::text::bigint FROM $schema.attempts AS a
    WHERE a.xid < pg_snapshot_xmin(pg_current_snapshot()) AND a.seq > %s ORDER BY a.xid DESC, a.seq DESC LIMIT 1), 0)

-- name: log
SELECT /*columns*/ FROM $schema.attempts AS a JOIN $schema.queues AS q ON q.id = a.queue_id
WHERE a.xid > %s::text::xid8 AND a.xid <= %s::text::xid8 AND a.seq > %s AND a.seq <= %s
ORDER BY a.xid FETCH FIRST %s ROWS WITH TIES
