-- name: plain
SELECT $schema.enqueue_plain(ROW(/*batch*/)::$schema.job_batch, $18::bigint, $19::integer, $20::boolean)

-- A single job with a new id and only defaults, on a queue that exists. That is the case of a web request, so every microsecond
-- counts, and a function would cost dozens of them.
-- name: one
WITH job AS (
    INSERT INTO $schema.jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
    SELECT $1, q.id, $2, $3::bigint, $4::bigint, $5::smallint, $6::integer, $7::smallint, $8::bytea
    FROM $schema.queues AS q WHERE q.name = $9
    RETURNING id, queue_id, state, run_at, rank
)
INSERT INTO $schema.moves (queue_id, scheduled, ready, stir, ranks, low_run_at, high_run_at)
SELECT queue_id, 1 - state, state, 1, ARRAY[rank], run_at, CASE WHEN state = 1 THEN run_at END
FROM job
WHERE $schema.check_not_repeated(id)
RETURNING CASE WHEN $10::integer = 2 THEN pg_notify($11, $9) END

-- name: by_rules
SELECT job_id, existed FROM $schema.enqueue_by_rules($1::json, $2::bytea, $3::integer[], $4::bigint, $5::integer, $6::boolean)

-- For a bulk write: see `may_stage`.
-- name: stage
INSERT INTO $schema.staged (batch, write, task, number, jobs, by_rules, locks)
SELECT ROW(/*batch*/)::$schema.job_batch, $18, $19, $20::integer, $21::integer, $22::json, $23::integer
WHERE $schema.may_stage($18, $24, $25::bigint)

-- name: complete
INSERT INTO $schema.staged (write, task, number, is_last)
SELECT $1, $2, $3::integer, true WHERE $schema.may_stage($1, $4, $5::bigint)
