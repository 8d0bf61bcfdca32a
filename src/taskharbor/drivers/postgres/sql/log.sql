-- name: epoch
SELECT max(epoch) FROM $schema.epochs

-- name: page
-- In commit order, as far as it is certain: no row can appear below the oldest running transaction.
SELECT /*attempt*/ FROM $schema.attempts AS a JOIN (SELECT id AS queue_id, name AS queue FROM $schema.queues) AS q USING (queue_id)
WHERE (a.xid, a.seq) > ($1::bigint, $2::bigint) AND a.xid < $schema.log_xid(pg_snapshot_xmin(pg_current_snapshot()))
ORDER BY a.xid, a.seq LIMIT $3::bigint

-- name: held_back
-- The newest transaction with visible rows that a reader may not have yet.
SELECT max(a.xid) FROM $schema.attempts AS a WHERE a.xid >= $schema.log_xid(pg_snapshot_xmin(pg_current_snapshot()))

-- name: is_over
SELECT $schema.log_xid(pg_snapshot_xmin(pg_current_snapshot())) > $1::bigint

-- name: of_job
SELECT /*attempt*/ FROM $schema.attempts AS a JOIN (SELECT id AS queue_id, name AS queue FROM $schema.queues) AS q USING (queue_id)
WHERE a.job_id = $1 ORDER BY a.seq

-- name: stream
-- The store's id, the last row that retention removed, and the last transaction whose rows are all visible.
SELECT (SELECT system_id FROM $schema.epochs ORDER BY epoch LIMIT 1), e.trimmed_xid, greatest(e.trimmed_xid, (
    SELECT a.xid FROM $schema.attempts AS a WHERE a.xid < $schema.log_xid(pg_snapshot_xmin(pg_current_snapshot()))
    ORDER BY a.xid DESC, a.seq DESC LIMIT 1))
FROM $schema.epochs AS e ORDER BY e.epoch DESC LIMIT 1

-- name: range
SELECT /*attempt*/ FROM $schema.attempts AS a JOIN (SELECT id AS queue_id, name AS queue FROM $schema.queues) AS q USING (queue_id)
WHERE a.xid > $1::bigint AND a.xid <= $2::bigint ORDER BY a.xid FETCH FIRST ($3::bigint) ROWS WITH TIES
