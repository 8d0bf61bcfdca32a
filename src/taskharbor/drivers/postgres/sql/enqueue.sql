-- name: plain
SELECT $schema.enqueue_plain(
    %s, %s::text[], %s, %s::text[], %s::bigint, %s::bigint[], %s::bigint, %s::bigint[], %s::smallint, %s::smallint[],
    %s::integer, %s, %s::text[], %s, %s::bigint, %s::integer, %s::bigint, %s::bigint, %s::smallint,
    %b::bytea, %s::integer[], %s::bigint, %s::smallint)

-- name: one
SELECT $schema.enqueue_one(%s, %s, %s, %s::bigint, %s::bigint, %s::smallint, %s::integer, %b::bytea, %s::bigint, %s::smallint)

-- name: by_rules
SELECT job_id, existed FROM $schema.enqueue_by_rules(%s::json, %b::bytea, %s::integer[], %s::bigint, %s::smallint)
