-- name: epochs
SELECT epoch, last_seq FROM $schema.epochs ORDER BY epoch

-- name: page
-- In commit order, as far as it is certain: below the oldest transaction that still runs nothing can appear any more.
SELECT /*attempt*/ FROM $schema.attempts AS a JOIN (SELECT id AS queue_id, name AS queue FROM $schema.queues) AS q USING (queue_id)
WHERE (a.xid, a.seq) > ($1::text::xid8, $2::bigint) AND a.seq > $3::bigint AND a.xid < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY a.xid, a.seq LIMIT $4::bigint

-- name: page_of_old_epoch
-- All of it was committed long ago, in another cluster.
SELECT /*attempt*/ FROM $schema.attempts AS a JOIN (SELECT id AS queue_id, name AS queue FROM $schema.queues) AS q USING (queue_id)
WHERE (a.xid, a.seq) > ($1::text::xid8, $2::bigint) AND a.seq > $3::bigint AND a.seq <= $4::bigint
ORDER BY a.xid, a.seq LIMIT $5::bigint

-- name: is_held_back
-- Whether rows are there that a reader may not have yet.
SELECT EXISTS (SELECT FROM $schema.attempts AS a WHERE a.xid >= pg_snapshot_xmin(pg_current_snapshot()) AND a.seq > $1::bigint)

-- name: of_job
SELECT /*attempt*/ FROM $schema.attempts AS a JOIN (SELECT id AS queue_id, name AS queue FROM $schema.queues) AS q USING (queue_id)
WHERE a.job_id = $1 ORDER BY a.seq

-- name: streams
SELECT epoch, last_seq, system_id, trimmed_xid::text::bigint FROM $schema.epochs ORDER BY epoch

-- name: end_of_log
-- The last transaction of which all rows can be seen: below the oldest one that still runs nothing can appear any more.
SELECT coalesce((
    SELECT a.xid::text::bigint FROM $schema.attempts AS a
    WHERE a.xid < pg_snapshot_xmin(pg_current_snapshot()) AND a.seq > $1::bigint ORDER BY a.xid DESC, a.seq DESC LIMIT 1), 0)

-- name: range
SELECT /*attempt*/ FROM $schema.attempts AS a JOIN (SELECT id AS queue_id, name AS queue FROM $schema.queues) AS q USING (queue_id)
WHERE a.xid > $1::text::xid8 AND a.xid <= $2::text::xid8 AND a.seq > $3::bigint AND a.seq <= $4::bigint
ORDER BY a.xid FETCH FIRST ($5::bigint) ROWS WITH TIES
