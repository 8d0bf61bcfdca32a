-- name: attempt_columns
-- In the order of the schema; instants and codes stay numbers, which cost Arrow nothing to convert.
a.seq, a.job_id, q.name, a.type, a.key, a.rank, a.fence, a.worker, a.created_at, a.run_at, a.reserved_at, a.lease_expires_at,
    a.ended_at, a.outcome, a.state, a.error_type, a.error_message, a.payload_size

-- name: live_columns
-- 0 and 1 both wait: which of them a job is follows from the clock.
j.id, q.name, j.type, CASE WHEN j.state > 1 THEN j.state WHEN j.run_at > %(now)s THEN 0::smallint ELSE 1::smallint END AS state,
    j.key, j.idempotency_key, j.rank, j.run_at, j.created_at, j.attempts, j.stalls, j.fence, j.max_attempts,
    coalesce(j.max_stalls, 0), j.worker, j.reserved_at, j.expires_at, j.failed_at, NULL::bigint, j.last_error, NULL::text,
    coalesce(j.codec, 'json'), j.headers, j.payload, NULL::bytea

-- name: ended_columns
j.id, q.name, j.type, j.state, j.key, j.idempotency_key, j.rank, j.run_at, j.created_at, j.attempts, j.stalls, j.fence,
    j.max_attempts, coalesce(j.max_stalls, 0), NULL::text, NULL::bigint, NULL::bigint, j.failed_at, j.finished_at, j.last_error,
    j.merged_into, coalesce(j.codec, 'json'), j.headers, j.payload, j.result

-- name: attempts_of_blocks
-- What was committed when the read was planned, whenever this part of it comes to be read: rows are never changed, and
-- each carries the number of its transaction. Those up to `begin` are older than this cluster.
SELECT /*attempt_columns*/ FROM $schema./*table*/ AS a JOIN $schema.queues AS q ON q.id = a.queue_id
WHERE a.ctid >= %(from)s::tid AND a.ctid < %(to)s::tid
    AND (a.xid < %(xmin)s::xid8 OR a.seq <= %(begin)s OR pg_visible_in_snapshot(a.xid, %(snapshot)s::pg_snapshot)) /*filters*/

-- name: attempts_of_range
-- Between two cursors of one epoch. Nothing can appear there any more, so no snapshot is needed.
SELECT /*attempt_columns*/ FROM $schema.attempts AS a JOIN $schema.queues AS q ON q.id = a.queue_id
WHERE (a.xid, a.seq) > (%(after_xid)s::xid8, %(after_seq)s) AND (a.xid, a.seq) <= (%(until_xid)s::xid8, %(until_seq)s)
    AND a.seq > %(begin)s AND a.seq <= %(end)s /*filters*/

-- name: live_jobs
SELECT /*live_columns*/ FROM $schema.jobs AS j JOIN $schema.queues AS q ON q.id = j.queue_id WHERE true /*filters*/

-- name: ended_jobs
SELECT /*ended_columns*/ FROM $schema./*table*/ AS j JOIN $schema.queues AS q ON q.id = j.queue_id WHERE true /*filters*/

-- name: finished_of_blocks
SELECT /*ended_columns*/ FROM $schema./*table*/ AS j JOIN $schema.queues AS q ON q.id = j.queue_id
WHERE j.ctid >= %(from)s::tid AND j.ctid < %(to)s::tid /*filters*/

-- name: days
-- The tables of a partitioned one: how many blocks each has, and which instants it holds (NULL: any).
SELECT c.relname, pg_relation_size(c.oid) / current_setting('block_size')::bigint,
    substring(pg_get_expr(c.relpartbound, c.oid) FROM 'FROM \(''?(-?\d+)''?\)')::bigint,
    substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''?(-?\d+)''?\)')::bigint
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass(%(parent)s)
ORDER BY c.relname

-- name: snapshot
SELECT pg_current_snapshot()::text, pg_snapshot_xmin(pg_current_snapshot())::text, max(last_seq) FROM $schema.epochs

-- name: epochs
SELECT epoch, last_seq FROM $schema.epochs ORDER BY epoch

-- name: end_of_log
-- The last row that is certain (below the oldest transaction that still runs nothing can appear any more), and the number of the
-- newest transaction of which rows can be seen at all.
SELECT e.epoch, certain.xid::text, certain.seq, newest.xid::text
FROM (SELECT epoch, last_seq FROM $schema.epochs ORDER BY epoch DESC LIMIT 1) AS e
    LEFT JOIN LATERAL (
        SELECT a.xid, a.seq FROM $schema.attempts AS a
        WHERE a.xid < pg_snapshot_xmin(pg_current_snapshot()) AND a.seq > e.last_seq ORDER BY a.xid DESC, a.seq DESC LIMIT 1
    ) AS certain ON true
    LEFT JOIN LATERAL (
        SELECT a.xid FROM $schema.attempts AS a WHERE a.seq > e.last_seq ORDER BY a.xid DESC, a.seq DESC LIMIT 1
    ) AS newest ON true

-- name: is_over
SELECT pg_snapshot_xmin(pg_current_snapshot()) > %(xid)s::xid8

-- name: around
-- Of a cursor: whether its own row is still there, the next row, the number given out last, and whether the cursor's transaction
-- has begun in this cluster at all. Also whether retention removed rows after the cursor's, or its own as the last.
SELECT EXISTS (SELECT FROM $schema.attempts AS a WHERE a.xid = %(xid)s::xid8 AND a.seq = %(seq)s), following.xid::text, following.seq,
    (SELECT last_value FROM $schema.attempt_seq), %(xid)s::xid8 < pg_snapshot_xmax(pg_current_snapshot()),
    (e.trimmed_xid, e.trimmed_seq) > (%(xid)s::xid8, %(seq)s), (e.trimmed_xid, e.trimmed_seq) = (%(xid)s::xid8, %(seq)s)
FROM (SELECT trimmed_xid, trimmed_seq FROM $schema.epochs ORDER BY epoch DESC LIMIT 1) AS e
    LEFT JOIN LATERAL (
        SELECT a.xid, a.seq FROM $schema.attempts AS a
        WHERE (a.xid, a.seq) > (%(xid)s::xid8, %(seq)s) AND a.seq > %(begin)s AND a.seq <= %(end)s ORDER BY a.xid, a.seq LIMIT 1
    ) AS following ON true

-- name: limited
SELECT a.xid::text, a.seq FROM $schema.attempts AS a
WHERE (a.xid, a.seq) > (%(after_xid)s::xid8, %(after_seq)s) AND (a.xid, a.seq) <= (%(until_xid)s::xid8, %(until_seq)s)
    AND a.seq > %(begin)s AND a.seq <= %(end)s
ORDER BY a.xid, a.seq OFFSET %(skipped)s LIMIT 1

-- name: probes
-- The first number at or after each of some transactions: how densely the log is written between them.
SELECT p.n, (
    SELECT a.seq FROM $schema.attempts AS a WHERE (a.xid, a.seq) > (p.xid, 0) AND a.seq > %(begin)s ORDER BY a.xid, a.seq LIMIT 1)
FROM unnest(%(xids)s::xid8[]) WITH ORDINALITY AS p(xid, n) ORDER BY p.n

-- name: time
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
