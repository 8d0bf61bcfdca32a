-- Every lease that was granted while others of its queue were valid, with their number, itself included, if that is more than the
-- queue ever allowed. Judged where a lease is granted and not all the time, because a limit that is lowered revokes no lease.
-- Time is cut into buckets, every lease is put into each bucket it touches, and each bucket is swept on its own: no task sees a
-- queue's whole history.
-- :slack  seconds by which the clocks of two callers may differ
WITH seen AS (
    SELECT *, lag(observed_at) OVER by_time AS since, lag(max_inflight) OVER by_time AS before
    FROM {limits} WINDOW by_time AS (PARTITION BY source, queue ORDER BY observed_at)
), changes AS (
    -- Stretches of one limit: from when the one before was last seen until the next one was first seen. In between both hold, since
    -- nobody knows when it changed.
    SELECT source, queue, max_inflight, since, lead(observed_at) OVER by_time AS until
    FROM seen WHERE since IS NULL OR NOT max_inflight <=> before
    WINDOW by_time AS (PARTITION BY source, queue ORDER BY observed_at)
), watched AS (
    SELECT source, queue, min(max_inflight) AS smallest, collect_list(struct(since, until, max_inflight)) AS stretches
    FROM changes GROUP BY source, queue HAVING smallest IS NOT NULL
), leases AS (
    SELECT /*+ BROADCAST(watched) */ source, queue, smallest, job_id, fence,
        unix_micros(reserved_at) AS began, unix_micros(least(ended_at, lease_expires_at)) AS ended
    FROM {attempts} JOIN watched USING (source, queue)
    WHERE lease_expires_at IS NOT NULL AND reserved_at < least(ended_at, lease_expires_at)
), widths AS (
    -- As wide as the average lease, and a minute at least: the result has at most twice as many rows as there are leases.
    SELECT source, queue, greatest(bigint(avg(ended - began)), 60000000) AS width FROM leases GROUP BY source, queue
), touched AS (
    SELECT /*+ BROADCAST(widths) */ leases.*, width, explode(sequence(began div width, (ended - 1) div width)) AS bucket
    FROM leases JOIN widths USING (source, queue)
), events AS (
    -- The order at one instant: 0 a lease from an earlier bucket, 1 the end of one, which makes room for 2, the start of one.
    SELECT source, queue, smallest, job_id, fence, bucket, inline(array(
        struct(greatest(began, bucket * width) AS t, IF(began < bucket * width, 0, 2) AS what, 1 AS step),
        struct(ended AS t, 1 AS what, -1 AS step)
    )) FROM touched
), swept AS (
    -- A duplicated row is one lease. Another check reports the duplicate.
    SELECT *, coalesce(lag(struct(t, what, job_id, fence)) OVER (
        PARTITION BY bucket, source, queue ORDER BY t, what, job_id, fence
    ) = struct(t, what, job_id, fence), false) AS is_copy FROM events
), levels AS (
    SELECT *, sum(IF(is_copy, 0, step)) OVER (
        PARTITION BY bucket, source, queue ORDER BY t, what, job_id, fence ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS level FROM swept
), crowded AS (
    SELECT source, queue, job_id, fence, level, timestamp_micros(t) AS at FROM levels
    WHERE what = 2 AND NOT is_copy AND level > smallest
), judged AS (
    SELECT /*+ BROADCAST(watched) */ crowded.*, transform(
        filter(stretches, one -> (one.since IS NULL OR one.since <= at)
            AND (one.until IS NULL OR at < one.until + make_dt_interval(0, 0, 0, :slack))),
        one -> one.max_inflight
    ) AS held
    FROM crowded JOIN watched USING (source, queue)
)
-- The largest limit that may have held; null if there may have been none.
SELECT *, IF(exists(held, one -> one IS NULL), NULL, array_max(held)) AS allowed, level > allowed AS limit_exceeded FROM judged
