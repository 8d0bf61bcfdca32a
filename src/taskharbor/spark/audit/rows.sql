-- What a row of the log shows alone.
-- :slack    seconds by which the clocks of two callers may differ
-- :longest  seconds that a lease lasts at most after a claim or a heartbeat
WITH rows AS (
    SELECT *, reserved_at IS NOT NULL AND lease_expires_at IS NOT NULL AS is_leased, make_dt_interval(0, 0, 0, :slack) AS slack,
        coalesce(outcome IN ('done', 'dead', 'cancelled', 'merged', 'retried', 'released', 'expired', 'requeued'), false) AS is_known
    FROM {attempts}
)
SELECT *,
    reserved_at < run_at AS started_early,
    is_leased AND outcome IN ('done', 'dead', 'retried', 'released', 'cancelled') AND ended_at >= lease_expires_at AS settled_too_late,
    is_leased AND outcome = 'expired' AND ended_at < lease_expires_at AS expired_too_early,
    ended_at < reserved_at OR lease_expires_at <= reserved_at
        -- A job that was due when it was stored may be claimed by a caller that read its clock a moment before.
        OR created_at > reserved_at AND NOT (run_at <= reserved_at AND created_at <= reserved_at + slack) AS times_out_of_order,
    is_known AND NOT CASE
        WHEN outcome IN ('done', 'dead', 'cancelled') THEN state = outcome
        WHEN outcome = 'merged' THEN state = 'cancelled'
        WHEN outcome IN ('retried', 'released') THEN state IN ('ready', 'scheduled')
        -- Scheduled where it absorbed a blocked job of its key that was due later.
        WHEN outcome = 'expired' THEN state IN ('ready', 'scheduled', 'dead', 'cancelled')
        -- Blocked where its key is inflight.
        ELSE state IN ('ready', 'scheduled', 'blocked')
    END AS state_contradicts_outcome,
    (reserved_at IS NULL) <> (lease_expires_at IS NULL)
        OR outcome IN ('done', 'dead', 'retried', 'released', 'expired') AND reserved_at IS NULL
        OR outcome IN ('merged', 'requeued') AND reserved_at IS NOT NULL AS lease_contradicts_outcome,
    lease_expires_at > greatest(reserved_at, ended_at) + slack + make_dt_interval(0, 0, 0, :longest) AS lease_too_long,
    outcome = 'done' AND error_type IS NOT NULL AS done_with_error,
    NOT is_known AS unknown_outcome
FROM rows
