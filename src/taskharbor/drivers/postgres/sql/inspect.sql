-- name: get
SELECT /*job*/ FROM $schema.job_records WHERE id = ANY ($1::text[])

-- name: suspect
-- Jobs with values beyond the bounds of the contract, and all that have headers. $1: also jobs that have ended.
SELECT id, queue, headers, NOT coalesce(
    length(trim(id)) BETWEEN 1 AND 200 AND length(trim(type)) BETWEEN 1 AND 200 AND coalesce(flags, 0) BETWEEN -32 AND 31
    AND (has_ended OR 1e6 >= ALL (ARRAY[attempts, stalls, max_attempts]) AND 0 <= ALL (ARRAY[attempts, stalls, max_attempts])
         AND 1::bigint << 53 >= ALL (ARRAY[fence, run_at, created_at]) AND -(1::bigint << 53) <= ALL (ARRAY[run_at, created_at])), false)
FROM $schema.job_records WHERE $1::boolean OR NOT has_ended

-- name: newest
SELECT last_value + 1 FROM $schema.job_seq

-- Only numbers from a window: a summary finds them, and an index would have to be updated at every move of a job. States 0 and 1
-- both wait: the clock decides which of them a job is. A value that is NULL does not restrict. $6: whether a job that has not
-- ended may match; otherwise that table is not read.
-- name: list
SELECT /*job*/ FROM $schema.job_records AS j
WHERE j.seq < $1::bigint AND j.seq >= $2::bigint AND j.state = ANY ($3::smallint[])
    AND (j.state > 1 OR CASE WHEN j.run_at > $4::bigint THEN 0 ELSE 1 END = ANY ($5::smallint[]))
    AND ($6::boolean OR j.has_ended)
    AND ($7::text IS NULL OR j.queue = $7) AND ($8::text[] IS NULL OR j.type = ANY ($8)) AND ($9::text IS NULL OR j.key = $9)
    AND ($10::text IS NULL OR j.worker = $10) AND ($11::bigint IS NULL OR j.finished_at < $11)
ORDER BY j.seq DESC LIMIT $12::bigint

-- For dead jobs alone the index by number gives the newest, however far apart they are. The planner must not take the whole
-- window.
-- name: list_dead
SELECT /*job*/ FROM (
    SELECT d.seq AS number FROM $schema.dead AS d
    WHERE d.seq < $1::bigint AND ($2::text IS NULL OR d.queue_id = (SELECT id FROM $schema.queues WHERE name = $2))
        AND ($3::text[] IS NULL OR d.type = ANY ($3)) AND ($4::text IS NULL OR d.key = $4)
        AND ($5::bigint IS NULL OR d.finished_at < $5)
    ORDER BY d.seq DESC LIMIT $6::bigint
) AS newest JOIN $schema.job_records AS j ON j.seq = newest.number AND j.state = 5 AND j.has_ended
ORDER BY j.seq DESC

-- name: stats
-- Jobs stored as scheduled that are due by the caller's clock, and jobs stored as ready that are not, are counted separately. The
-- latter exist only up to high_run_at.
SELECT q.name, q.paused, q.max_inflight, q.failure_queue, q.keep_done_us, q.keep_dead_us, q.keep_attempts_us, q.declaration,
    s.scheduled - due.jobs + early.jobs, s.ready + due.jobs - early.jobs, s.blocked, s.inflight, s.done, s.dead, s.cancelled,
    s.done_total, s.dead_total, s.cancelled_total, head.run_at
FROM $schema.queues AS q,
    LATERAL (
        SELECT coalesce(sum(scheduled), 0)::bigint AS scheduled, coalesce(sum(ready), 0)::bigint AS ready,
               coalesce(sum(blocked), 0)::bigint AS blocked, coalesce(sum(inflight), 0)::bigint AS inflight,
               coalesce(sum(done), 0)::bigint AS done, coalesce(sum(dead), 0)::bigint AS dead,
               coalesce(sum(cancelled), 0)::bigint AS cancelled, coalesce(sum(done_total), 0)::bigint AS done_total,
               coalesce(sum(dead_total), 0)::bigint AS dead_total, coalesce(sum(cancelled_total), 0)::bigint AS cancelled_total,
               max(high_run_at) AS high_run_at
        FROM $schema.moves WHERE queue_id = q.id
    ) AS s,
    LATERAL (
        SELECT count(*) AS jobs FROM $schema.jobs AS j
        WHERE j.queue_id = q.id AND j.state = 0 AND coalesce(j.expires_at, j.run_at) <= $1::bigint AND s.scheduled > 0
    ) AS due,
    LATERAL (
        SELECT count(*) AS jobs FROM $schema.jobs AS j, unnest($schema.waiting_ranks(q.id)) AS r(rank)
        WHERE s.high_run_at > $1 AND j.queue_id = q.id AND j.rank = r.rank AND j.state <= 1
          AND j.run_at > $1 AND j.run_at <= s.high_run_at AND j.state = 1
    ) AS early,
    LATERAL (
        SELECT (SELECT first.run_at FROM unnest($schema.waiting_ranks(q.id)) WITH ORDINALITY AS r(rank, n),
                    LATERAL (SELECT j.run_at FROM $schema.jobs AS j
                             WHERE j.queue_id = q.id AND j.rank = r.rank AND j.state <= 1 AND j.run_at <= $1
                             ORDER BY j.run_at, j.seq LIMIT 1) AS first
                ORDER BY r.n LIMIT 1) AS run_at
    ) AS head
WHERE $2::text IS NULL OR q.name = $2
ORDER BY q.name

-- name: settings
SELECT paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us, declaration
FROM $schema.queues WHERE name = $1

-- name: time
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: notify
SELECT pg_notify($1, queue) FROM unnest($2::text[]) AS queue

-- name: claim
SELECT /*claimed*/ FROM $schema.claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)

-- name: remove
SELECT id, state FROM $schema.remove_jobs($1)

-- name: extend_lease
SELECT n, code, expires_at, cancel_requested FROM $schema.extend_lease($1, $2, $3, $4, $5, $6)

-- name: watch
SELECT snapshot, is_stirred, due FROM $schema.watch($1, $2, $3, $4)
