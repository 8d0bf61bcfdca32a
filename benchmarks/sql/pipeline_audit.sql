-- The kinds of checks of the audit over `silver` and `bronze`, each as a count of violations.
SELECT count(*) FROM silver
WHERE reserved_at < run_at OR ended_at < reserved_at OR lease_expires_at <= reserved_at
    OR (outcome IN ('done', 'dead', 'retried', 'released', 'cancelled') AND ended_at >= lease_expires_at)
    OR (outcome = 'expired' AND ended_at < lease_expires_at)
    OR (outcome IN ('done', 'dead', 'retried', 'released', 'expired') AND reserved_at IS NULL)
    OR lease_expires_at > greatest(reserved_at, ended_at) + INTERVAL 24 HOURS
    OR (outcome = 'done' AND error_type IS NOT NULL);

SELECT count(*) FROM (SELECT seq FROM bronze GROUP BY seq HAVING count(*) > 1);

SELECT count(*) FROM (
    SELECT fence, state, outcome, reserved_at, run_at, key, worker, identity,
        lag(fence) OVER by_fence AS lower, lag(reserved_at) OVER by_fence AS lower_reserved_at, lag(worker) OVER by_fence AS lower_worker,
        lag(state) OVER by_seq AS previous, lag(outcome) OVER by_seq AS previous_outcome, lag(ended_at) OVER by_seq AS previous_end,
        lag(identity) OVER by_seq AS previous_identity,
        max(reserved_at) OVER (PARTITION BY created_at, job_id ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS latest,
        max(valid_until) OVER (PARTITION BY created_at, job_id ORDER BY reserved_at, valid_until, seq
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS held_until
    FROM (SELECT *, hash(queue, coalesce(key, ''), CASE WHEN key IS NULL THEN type END) AS identity FROM silver)
    WINDOW by_fence AS (PARTITION BY created_at, job_id ORDER BY fence, seq),
        by_seq AS (PARTITION BY created_at, job_id ORDER BY seq)
) WHERE fence > lower + 1 OR reserved_at < held_until
    OR (previous IN ('done', 'dead', 'cancelled') AND outcome <> 'requeued')
    OR reserved_at < latest OR identity <> previous_identity
    OR (fence = lower AND reserved_at = lower_reserved_at AND worker IS DISTINCT FROM lower_worker)
    OR (key IS NULL AND previous_outcome = 'retried' AND previous = 'scheduled' AND run_at < previous_end)
    OR (outcome = 'merged' AND previous <> 'blocked');

SELECT count(*) FROM (
    SELECT reserved_at, max(valid_until) OVER (PARTITION BY queue, key ORDER BY reserved_at, valid_until
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS held_until
    FROM silver WHERE key IS NOT NULL AND reserved_at IS NOT NULL
) WHERE reserved_at < held_until;

SELECT count(*) FROM (
    SELECT sum(step) OVER (PARTITION BY queue ORDER BY instant, step ROWS UNBOUNDED PRECEDING) AS level
    FROM (
        SELECT queue, reserved_at AS instant, 1 AS step FROM silver WHERE reserved_at < valid_until
        UNION ALL
        SELECT queue, valid_until, -1 FROM silver WHERE reserved_at < valid_until
    )
) WHERE level > 100000;
