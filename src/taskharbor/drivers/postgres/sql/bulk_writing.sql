-- name: stage
INSERT INTO $schema.staged (write, task, number, queue, jobs, are_alike, ids, types, run_ats, created_ats, ranks, max_attempts,
                            headers, codecs, timeouts_us, max_stalls, backoff_mins, backoff_maxs, flags, by_rules, locks, ends,
                            payloads)
SELECT %s, %s, %s::integer, %s, %s::integer, %s::boolean, %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::smallint[],
       %s::integer[], %s::text[], %s::text[], %s::bigint[], %s::integer[], %s::bigint[], %s::bigint[], %s::smallint[], %s::json,
       %s::integer, %b::integer[], %b::bytea
WHERE $schema.may_stage(%s, %s, %s::bigint)

-- name: complete
INSERT INTO $schema.staged (write, task, number, is_last)
SELECT %s, %s, %s::integer, true WHERE $schema.may_stage(%s, %s, %s::bigint)

-- name: publish
SELECT $schema.publish_write(%s, %s, %s::bigint, %s::text[], %s::bigint, %s::smallint, %s)

-- name: abandon
SELECT $schema.abandon_write(%s, %s, %s::bigint)

-- What an operator names by id: only what has ended goes. Also says of those that have not what they are.
-- name: remove
WITH gone_dead AS (
    DELETE FROM $schema.dead WHERE id = ANY (%(ids)s::text[]) RETURNING id, seq, queue_id, state
), gone_finished AS (
    DELETE FROM $schema.finished WHERE id = ANY (%(ids)s::text[]) RETURNING id, seq, queue_id, state
), gone AS (
    SELECT * FROM gone_dead UNION ALL SELECT * FROM gone_finished
), forgotten AS (
    DELETE FROM $schema.idempotency WHERE job_seq IN (SELECT seq FROM gone)
), counted AS (
    INSERT INTO $schema.moves (queue_id, done, dead, cancelled)
    SELECT queue_id, -count(*) FILTER (WHERE state = 4), -count(*) FILTER (WHERE state = 5), -count(*) FILTER (WHERE state = 6)
    FROM gone GROUP BY queue_id
)
SELECT id, state FROM gone
UNION ALL
SELECT id, state FROM $schema.jobs WHERE id = ANY (%(ids)s::text[])
