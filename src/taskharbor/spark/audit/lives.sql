-- What the rows of a job show in their order. A life is what has one id and one created_at: an id that retention has freed may be
-- given to another job later. Windows begin with created_at: Spark sorts fast by what differs in its first eight bytes.
-- :slack  seconds by which the clocks of two callers may differ
WITH rows AS (
    SELECT created_at, job_id, source, seq, queue, fence, worker, reserved_at, lease_expires_at, ended_at, outcome, state,
        reserved_at IS NOT NULL AND lease_expires_at IS NOT NULL AS is_leased,
        least(ended_at, lease_expires_at) AS until,
        -- A job with a key takes over type and time of another with that key.
        xxhash64(queue, coalesce(key, ''), IF(key IS NULL, type, NULL)) AS identity,
        IF(key IS NULL, run_at, NULL) AS due
    FROM {attempts}
), logs AS (
    SELECT source, queue, min(ended_at) AS oldest FROM {attempts} GROUP BY source, queue
), placed AS (
    -- Retention removes the oldest rows of a queue first: where one is left that ended before the job was created, all of the
    -- job's own rows are left too. One exchange serves all three orders below.
    SELECT /*+ BROADCAST(logs), REPARTITION(source, job_id) */ rows.*,
        created_at >= oldest + make_dt_interval(0, 0, 0, :slack) AS is_complete
    FROM rows JOIN logs USING (source, queue)
), by_fence AS (
    -- Copies come to stand beside each other, and so do leases that share a fence.
    SELECT *, lag(struct(seq, fence, reserved_at, lease_expires_at, ended_at, outcome, is_leased, worker)) OVER (
            PARTITION BY created_at, job_id, source
            ORDER BY fence, reserved_at ASC NULLS LAST, lease_expires_at, ended_at, outcome, seq
        ) AS lower
    FROM placed
), compared AS (
    SELECT *,
        lower IS NOT NULL AND fence <=> lower.fence AND reserved_at <=> lower.reserved_at
            AND lease_expires_at <=> lower.lease_expires_at AND ended_at <=> lower.ended_at AND outcome <=> lower.outcome AS is_copy,
        coalesce(is_leased AND lower.is_leased AND fence = lower.fence, false) AS has_same_fence
    FROM by_fence
), by_seq AS (
    SELECT *,
        last(IF(is_copy, NULL, struct(seq, fence, state, outcome, ended_at, identity))) IGNORE NULLS OVER earlier AS previous,
        max(IF(is_copy, NULL, fence)) OVER earlier AS highest,
        max(IF(is_leased AND NOT is_copy, reserved_at, NULL)) OVER earlier AS latest
    FROM compared WINDOW earlier AS (
        PARTITION BY created_at, job_id, source ORDER BY seq, fence ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    )
), by_time AS (
    -- At one instant a lease without extent comes before one that goes on: it ended first.
    SELECT *,
        max(IF(is_leased AND NOT is_copy, struct(until, reserved_at, fence), NULL)) OVER (
            PARTITION BY created_at, job_id, source ORDER BY reserved_at, until, seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS held,
        -- The highest fence before, if it is known.
        IF(lower IS NULL, IF(is_complete, 0, NULL), lower.fence) AS below,
        coalesce(reserved_at, ended_at) AS began_at,
        has_same_fence AND NOT is_copy AS has_twin,
        previous.state IN ('done', 'dead', 'cancelled') AND outcome <> 'requeued' AND NOT is_copy AS had_ended
    FROM by_seq
)
SELECT *,
    -- A row without a lease carries the fence of the last lease, so that one must have a row of its own.
    fence - below - int(is_leased) AS missing,
    fence - below - int(is_leased) > 0 AS fence_gap,
    -- The same row under the same number is found by its number.
    is_copy AND seq <> lower.seq AS duplicate_row,
    has_twin AS fence_used_twice,
    NOT is_copy AND NOT has_twin AND (fence < highest OR is_leased AND fence = highest) AS fence_out_of_order,
    NOT is_copy AND is_leased AND reserved_at < held.until AS overlapping_leases,
    NOT is_copy AND is_leased AND reserved_at < latest AS time_went_back,
    has_same_fence AND reserved_at = lower.reserved_at AND NOT worker <=> lower.worker AS settled_by_another,
    had_ended AND state IN ('done', 'dead', 'cancelled') AS ended_twice,
    had_ended AND state NOT IN ('done', 'dead', 'cancelled') AS active_after_end,
    NOT is_copy AND outcome = 'requeued' AND previous.state <> 'dead' AS requeued_alive,
    NOT is_copy AND identity <> previous.identity AS job_changed,
    NOT is_copy AND is_leased AND previous.outcome = 'retried' AND previous.state = 'scheduled'
        AND due < previous.ended_at - make_dt_interval(0, 0, 0, :slack) AS retried_too_early,
    -- A dead job that was requeued beside a job of its key is blocked.
    NOT is_copy AND outcome = 'merged' AND NOT had_ended AND previous.state <> 'blocked' AS ran_and_merged
FROM by_time
