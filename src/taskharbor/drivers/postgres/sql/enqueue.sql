-- name: plain
SELECT $schema.enqueue_plain(
    %s, %s::text[], %s, %s::text[], %s::bigint, %s::bigint[], %s::bigint, %s::bigint[], %s::smallint, %s::smallint[],
    %s::integer, %s, %s::text[], %s, %s::bigint, %s::integer, %s::bigint, %s::bigint, %s::smallint,
    %b::bytea, %s::integer[], %s::bigint, %s::smallint, %s::boolean)

-- A single job with a new id that uses nothing but defaults, on a queue that exists: what a web request does, so every
-- microsecond counts, and a function would cost dozens of them. `last_repetition` is read once the job is stored: where it is
-- still what the caller knew before, no later try can have stored the job and seen it end.
-- name: one
WITH job AS (
    INSERT INTO $schema.jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
    SELECT %s, q.id, %s, %s::bigint, %s::bigint, %s::smallint, %s::integer, %s::smallint, %b::bytea
    FROM $schema.queues AS q WHERE q.name = %s
    RETURNING id, queue_id, state, run_at, rank
)
INSERT INTO $schema.moves (queue_id, scheduled, ready, stir, ranks, low_run_at, high_run_at)
SELECT queue_id, 1 - state, state, 1, ARRAY[rank], run_at, CASE WHEN state = 1 THEN run_at END
FROM job
WHERE CASE WHEN $schema.last_repetition() = %s::bigint THEN true ELSE $schema.check_not_repeated(id) END
RETURNING $schema.last_repetition(), CASE WHEN %s::boolean THEN pg_notify(%s, %s) END

-- name: by_rules
SELECT job_id, existed FROM $schema.enqueue_by_rules(%s::json, %b::bytea, %s::integer[], %s::bigint, %s::smallint, %s::boolean)
