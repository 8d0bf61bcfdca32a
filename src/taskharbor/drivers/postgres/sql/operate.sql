-- name: cancel
SELECT $schema.cancel(%s::text[], %s::bigint, %s::smallint)

-- name: requeue
SELECT $schema.requeue(%s::text[], %s::bigint, %s::smallint, %s::boolean)

-- name: purge
SELECT $schema.purge(%s, %s::smallint[], %s::text[], %s, %s::bigint, %s::integer)

-- name: prune
SELECT $schema.prune(%s::bigint, %s::integer)

-- name: drop_days
SELECT $schema.drop_days(%s::bigint)

-- name: add_days
SELECT $schema.add_days(%s::bigint)

-- name: configure
SELECT $schema.configure(%s, %s::boolean, %s::integer, %s, %s::bigint, %s::bigint, %s::bigint, %s::smallint)

-- name: settings
SELECT paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us FROM $schema.queues WHERE name = %s
