-- name: plain
SELECT $schema.enqueue_plain(ROW(/*batch*/)::$schema.job_batch, $23::bigint, $24::integer, $25::boolean)

-- A single job with a new id that uses nothing but defaults, on a queue that exists: what a web request does, so every
-- microsecond counts, and a function would cost dozens of them. `last_repetition` is read once the job is stored: where it is
-- still what the caller knew before, no later try can have stored the job and seen it end.
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
WHERE CASE WHEN $schema.last_repetition() = $10::bigint THEN true ELSE $schema.check_not_repeated(id) END
RETURNING $schema.last_repetition(), CASE WHEN $11::integer = 2 THEN pg_notify($12, $9) END

-- name: by_rules
SELECT job_id, existed FROM $schema.enqueue_by_rules($1::json, $2::bytea, $3::integer[], $4::bigint, $5::integer, $6::boolean)

-- Within a transaction of the caller's. Where its snapshot stands still (REPEATABLE READ, SERIALIZABLE), jobs of a key that came
-- after it cannot be seen, so no rule about keys can be kept. Then nothing is done, and no row comes back.
-- name: by_key
SELECT job_id, existed FROM $schema.enqueue_by_rules(
    CASE WHEN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN $1::json END,
    $2::bytea, $3::integer[], $4::bigint, $5::integer, $6::boolean)

-- Of a bulk write: see `may_stage`.
-- name: stage
INSERT INTO $schema.staged (batch, write, task, number, jobs, by_rules, locks)
SELECT ROW(/*batch*/)::$schema.job_batch, $23, $24, $25::integer, $26::integer, $27::json, $28::integer
WHERE $schema.may_stage($23, $29, $30::bigint)

-- name: complete
INSERT INTO $schema.staged (write, task, number, is_last)
SELECT $1, $2, $3::integer, true WHERE $schema.may_stage($1, $4, $5::bigint)
