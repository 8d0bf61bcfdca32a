-- Sources of rows: read by statements whose values are literals.

-- name: attempts_of_blocks
-- The rows that were committed when the read was planned, whenever this part is read. Rows never change, and each has the number
-- of its transaction.
SELECT a.*, q.name AS queue FROM $schema./*table*/ AS a JOIN $schema.queues AS q ON q.id = a.queue_id
WHERE a.ctid >= %(from)s::tid AND a.ctid < %(to)s::tid
    AND (a.xid < %(xmin)s OR pg_visible_in_snapshot((a.xid & 281474976710655)::text::xid8, %(snapshot)s::pg_snapshot))

-- name: attempts_of_range
-- Rows between two cursors. No row can appear there any more, so no snapshot is needed.
SELECT a.*, q.name AS queue FROM $schema.attempts AS a JOIN $schema.queues AS q ON q.id = a.queue_id
WHERE (a.xid, a.seq) > (%(after_xid)s, %(after_seq)s) AND (a.xid, a.seq) <= (%(until_xid)s, %(until_seq)s)

-- name: jobs_in_states
-- One statement, one snapshot: a job that moves between the tables is in one of them.
SELECT * FROM $schema.job_records WHERE state = ANY (%(states)s::smallint[])

-- name: jobs_of_blocks
SELECT j.*, q.name AS queue
FROM $schema./*table*/ AS j JOIN $schema.queues AS q ON q.id = j.queue_id
WHERE j.ctid >= %(from)s::tid AND j.ctid < %(to)s::tid

-- Planning.

-- name: days
-- The partitions of a table that may hold rows from $2 to before $3 (NULL: any time), and the number of blocks of each.
SELECT c.relname::text, pg_relation_size(c.oid) / current_setting('block_size')::bigint
FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass($1)
    AND (substring(pg_get_expr(c.relpartbound, c.oid) FROM 'FROM \(''?(-?\d+)''?\)')::bigint < $3::bigint) IS NOT FALSE
    AND (substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''?(-?\d+)''?\)')::bigint > $2::bigint) IS NOT FALSE
ORDER BY c.relname

-- name: snapshot
SELECT pg_current_snapshot()::text, $schema.log_xid(pg_snapshot_xmin(pg_current_snapshot())),
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: end_of_log
-- The last row that is certain: no row can appear below the oldest running transaction.
SELECT a.xid, a.seq FROM $schema.attempts AS a WHERE a.xid < $schema.log_xid(pg_snapshot_xmin(pg_current_snapshot()))
ORDER BY a.xid DESC, a.seq DESC LIMIT 1

-- name: around
-- For a cursor: whether its own row is still there, the next row, the last given number, and whether the cursor's transaction has
-- begun in this cluster at all. Also whether retention removed rows after the cursor's, or its own as the last.
SELECT EXISTS (SELECT FROM $schema.attempts AS a WHERE a.xid = $1::bigint AND a.seq = $2::bigint), following.xid, following.seq,
    (SELECT last_value FROM $schema.attempt_seq), $1 < $schema.log_xid(pg_snapshot_xmax(pg_current_snapshot())),
    (e.trimmed_xid, e.trimmed_seq) > ($1, $2), (e.trimmed_xid, e.trimmed_seq) = ($1, $2)
FROM (SELECT trimmed_xid, trimmed_seq FROM $schema.epochs ORDER BY epoch DESC LIMIT 1) AS e
    LEFT JOIN LATERAL (
        SELECT a.xid, a.seq FROM $schema.attempts AS a WHERE (a.xid, a.seq) > ($1, $2) ORDER BY a.xid, a.seq LIMIT 1
    ) AS following ON true

-- name: limited
SELECT a.xid, a.seq FROM $schema.attempts AS a
WHERE (a.xid, a.seq) > ($1::bigint, $2::bigint) AND (a.xid, a.seq) <= ($3::bigint, $4::bigint)
ORDER BY a.xid, a.seq OFFSET $5::bigint LIMIT 1

-- name: probes
-- The first number at or after each of some transactions. They show how many rows are between them.
SELECT (SELECT a.seq FROM $schema.attempts AS a WHERE (a.xid, a.seq) > (p.xid, 0) ORDER BY a.xid, a.seq LIMIT 1)
FROM unnest($1::bigint[]) WITH ORDINALITY AS p(xid, n) ORDER BY p.n
