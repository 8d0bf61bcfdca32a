-- name: live_columns
j.seq, q.name, j.id, j.type, j.payload, j.rank, j.run_at, j.created_at, j.key, j.idempotency_key, j.max_attempts, j.max_stalls,
    j.state, j.attempts, j.stalls, j.fence, j.last_error, j.failed_at, NULL::bigint, NULL::bytea, j.progress,
    j.cancel_requested, NULL::text, j.token, j.worker, j.expires_at, j.reserved_at, j.codec, j.headers, j.timeout_us, j.flags,
    j.backoff_min_us, j.backoff_max_us

-- name: ended_columns
j.seq, q.name, j.id, j.type, j.payload, j.rank, j.run_at, j.created_at, j.key, j.idempotency_key, j.max_attempts, j.max_stalls,
    j.state, j.attempts, j.stalls, j.fence, j.last_error, j.failed_at, j.finished_at, j.result, NULL::bytea,
    false, j.merged_into, NULL::text, NULL::text, NULL::bigint, NULL::bigint, j.codec, j.headers, j.timeout_us, j.flags,
    j.backoff_min_us, j.backoff_max_us

-- name: get
SELECT /*live_columns*/ FROM $schema.jobs AS j JOIN $schema.queues AS q ON q.id = j.queue_id WHERE j.id = ANY (%(ids)s::text[])
UNION ALL
SELECT /*ended_columns*/ FROM $schema.finished AS j JOIN $schema.queues AS q ON q.id = j.queue_id WHERE j.id = ANY (%(ids)s::text[])
UNION ALL
SELECT /*ended_columns*/ FROM $schema.dead AS j JOIN $schema.queues AS q ON q.id = j.queue_id WHERE j.id = ANY (%(ids)s::text[])

-- name: list
SELECT * FROM (/*parts*/) AS found ORDER BY seq DESC LIMIT %(limit)s

-- name: list_live
-- Only numbers from a window: a summary finds them, an index would have to be kept up at every move of a job.
(SELECT /*live_columns*/ FROM $schema.jobs AS j JOIN $schema.queues AS q ON q.id = j.queue_id
 WHERE j.seq < %(before)s AND j.seq >= %(from)s AND (/*states*/) /*filters*/
 ORDER BY j.seq DESC LIMIT %(limit)s)

-- name: newest
SELECT last_value + 1 FROM $schema.job_seq

-- name: list_finished
(SELECT /*ended_columns*/ FROM $schema.finished AS j JOIN $schema.queues AS q ON q.id = j.queue_id
 WHERE j.seq < %(before)s AND j.seq >= %(from)s AND (/*states*/) /*filters*/
 ORDER BY j.seq DESC LIMIT %(limit)s)

-- name: list_dead
(SELECT /*ended_columns*/ FROM $schema.dead AS j JOIN $schema.queues AS q ON q.id = j.queue_id
 WHERE j.seq < %(before)s /*filters*/
 ORDER BY j.seq DESC LIMIT %(limit)s)

-- name: stats
-- Counters are what was folded and what was not yet. Jobs stored as scheduled that are due by the caller's clock, and those
-- stored as ready that are not, are counted apart; of the latter there can be any only up to high_run_at.
SELECT q.name, q.paused, q.max_inflight, q.failure_queue, q.keep_done_us, q.keep_dead_us, q.keep_attempts_us,
    s.scheduled - due.jobs + early.jobs, s.ready + due.jobs - early.jobs, s.blocked, s.inflight, s.done, s.dead, s.cancelled,
    s.done_total, s.dead_total, s.cancelled_total, head.run_at
FROM $schema.queues AS q,
    LATERAL (
        SELECT sum(scheduled)::bigint AS scheduled, sum(ready)::bigint AS ready, sum(blocked)::bigint AS blocked,
               sum(inflight)::bigint AS inflight, sum(done)::bigint AS done, sum(dead)::bigint AS dead,
               sum(cancelled)::bigint AS cancelled, sum(done_total)::bigint AS done_total,
               sum(dead_total)::bigint AS dead_total, sum(cancelled_total)::bigint AS cancelled_total,
               max(high_run_at) AS high_run_at
        FROM (
            SELECT scheduled, ready, blocked, inflight, done, dead, cancelled, done_total, dead_total, cancelled_total, high_run_at
            FROM $schema.totals WHERE queue_id = q.id
            UNION ALL
            SELECT scheduled, ready, blocked, inflight, done, dead, cancelled, done_total, dead_total, cancelled_total, high_run_at
            FROM $schema.moves WHERE queue_id = q.id
            UNION ALL
            SELECT 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL
        ) AS parts
    ) AS s,
    LATERAL (
        SELECT count(*) AS jobs FROM $schema.jobs AS j
        WHERE j.queue_id = q.id AND j.state = 0 AND coalesce(j.expires_at, j.run_at) <= %(now)s AND s.scheduled > 0
    ) AS due,
    LATERAL (
        SELECT count(*) AS jobs FROM $schema.jobs AS j, unnest($schema.waiting_ranks(q.id)) AS r(rank)
        WHERE s.high_run_at > %(now)s AND j.queue_id = q.id AND j.rank = r.rank AND j.state <= 1
          AND j.run_at > %(now)s AND j.run_at <= s.high_run_at AND j.state = 1
    ) AS early,
    LATERAL (
        SELECT (SELECT first.run_at FROM unnest($schema.waiting_ranks(q.id)) WITH ORDINALITY AS r(rank, n),
                    LATERAL (SELECT j.run_at FROM $schema.jobs AS j
                             WHERE j.queue_id = q.id AND j.rank = r.rank AND j.state <= 1 AND j.run_at <= %(now)s
                             ORDER BY j.run_at, j.seq LIMIT 1) AS first
                ORDER BY r.n LIMIT 1) AS run_at
    ) AS head
WHERE %(queue)s::text IS NULL OR q.name = %(queue)s
ORDER BY q.name

-- name: watch
SELECT snapshot, is_stirred, due FROM $schema.watch(%s::text[], %s::pg_snapshot[], %s::bigint[])
