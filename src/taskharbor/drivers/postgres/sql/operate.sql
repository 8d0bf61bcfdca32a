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

-- What an operator names by id: only what has ended goes. Also says of those that have not what they are.
-- name: remove
WITH gone_dead AS (
    DELETE FROM $schema.dead WHERE id = ANY (%(ids)s::text[]) RETURNING id, seq, queue_id, state, idempotency_key
), gone_finished AS (
    DELETE FROM $schema.finished WHERE id = ANY (%(ids)s::text[]) RETURNING id, seq, queue_id, state, idempotency_key
), gone AS (
    SELECT * FROM gone_dead UNION ALL SELECT * FROM gone_finished
), forgotten AS (
    DELETE FROM $schema.idempotency AS i USING gone AS g
    WHERE i.queue_id = g.queue_id AND i.idempotency_key = g.idempotency_key AND i.job_seq = g.seq
), forgotten_led AS (
    DELETE FROM $schema.idempotency WHERE is_led AND job_seq IN (SELECT seq FROM gone)
), counted AS (
    INSERT INTO $schema.moves (queue_id, done, dead, cancelled)
    SELECT queue_id, -count(*) FILTER (WHERE state = 4), -count(*) FILTER (WHERE state = 5), -count(*) FILTER (WHERE state = 6)
    FROM gone GROUP BY queue_id
)
SELECT id, state FROM gone
UNION ALL
SELECT id, state FROM $schema.jobs WHERE id = ANY (%(ids)s::text[])
