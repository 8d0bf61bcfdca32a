-- name: columns
a.seq, a.xid::text, a.job_id, q.name, a.type, a.key, a.rank, a.fence, a.worker, a.created_at, a.run_at, a.reserved_at,
    a.lease_expires_at, a.ended_at, a.outcome, a.state, a.error_type, a.error_message, a.payload_size

-- name: epochs
SELECT epoch, last_seq FROM $schema.epochs ORDER BY epoch

-- name: page
-- In commit order, as far as it is certain: below the oldest transaction that still runs nothing can appear any more.
SELECT /*columns*/ FROM $schema.attempts AS a JOIN $schema.queues AS q ON q.id = a.queue_id
WHERE (a.xid, a.seq) > (%(xid)s::text::xid8, %(seq)s::bigint) AND a.seq > %(after)s
    AND a.xid < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY a.xid, a.seq LIMIT %(limit)s

-- name: page_of_old_epoch
-- All of it was committed long ago, in another cluster.
SELECT /*columns*/ FROM $schema.attempts AS a JOIN $schema.queues AS q ON q.id = a.queue_id
WHERE (a.xid, a.seq) > (%(xid)s::text::xid8, %(seq)s::bigint) AND a.seq > %(after)s AND a.seq <= %(until)s
ORDER BY a.xid, a.seq LIMIT %(limit)s

-- name: is_held_back
-- Whether rows are there that a reader may not have yet.
SELECT EXISTS (SELECT FROM $schema.attempts AS a WHERE a.xid >= pg_snapshot_xmin(pg_current_snapshot()) AND a.seq > %(after)s)

-- name: of_job
SELECT /*columns*/ FROM $schema.attempts AS a JOIN $schema.queues AS q ON q.id = a.queue_id WHERE a.job_id = %(id)s ORDER BY a.seq
