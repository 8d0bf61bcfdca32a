-- name: reserve
SELECT * FROM $schema.reserve(
    %s, %s::text[], %s::integer, %s::bigint, %s::bigint, %s, %s, %s::integer, %s::smallint,
    %s::integer, %s::pg_snapshot, %s::bigint, %s::bigint, %s::smallint[], %s::bigint[], %s::bigint[], %s::boolean)

-- name: settle
SELECT $schema.settle(%s::bigint[], %s::text[], %s::text[], %s::jsonb, %s::bigint, %s::smallint, %s::boolean)

-- name: extend
SELECT n, code, expires_at, cancel_requested
FROM $schema.extend_lease(%s::bigint[], %s::text[], %s::text[], %s::jsonb, %s::bigint, %s::bigint) ORDER BY n

-- name: reclaim
SELECT $schema.reclaim(%s, %s::bigint, %s::integer, %s::smallint)

-- name: fold
SELECT $schema.fold(%s)

-- name: time
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
