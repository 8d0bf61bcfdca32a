-- name: put
INSERT INTO $schema.blobs (name, data) VALUES ($1, $2::bytea) ON CONFLICT (name) DO UPDATE SET data = excluded.data RETURNING true

-- name: create
INSERT INTO $schema.blobs (name, data) VALUES ($1, $2::bytea) ON CONFLICT (name) DO NOTHING RETURNING true

-- name: replace
UPDATE $schema.blobs SET data = $2::bytea WHERE name = $1 AND data = $3::bytea RETURNING true

-- name: read
SELECT b.data FROM unnest($1::text[]) WITH ORDINALITY AS n(name, at) LEFT JOIN $schema.blobs AS b ON b.name = n.name ORDER BY n.at

-- name: names
SELECT name FROM $schema.blobs WHERE starts_with(name, $1) ORDER BY name

-- name: drop
DELETE FROM $schema.blobs WHERE name = ANY ($1::text[]) RETURNING true

-- name: lock_series
SELECT pg_advisory_xact_lock($schema.write_lock($1))

-- name: portion
SELECT number, portion, coalesce(jobs, 0) FROM $schema.published WHERE series = $1

-- name: note
INSERT INTO $schema.published (series, number, portion, jobs) VALUES ($1, $2::bigint, $3::integer, $4::bigint)
ON CONFLICT (series) DO UPDATE
SET number = excluded.number, portion = excluded.portion, jobs = excluded.jobs, published_at = excluded.published_at RETURNING true
