-- The tables of a lake, computed from the attempt log (`log`, with its source) and nothing else. Each view has columns of the table
-- `schema.table` that its name `schema_table` names. Statements end with a semicolon at the end of a line.
CREATE VIEW bronze_attempts AS SELECT *, ended_at::DATE AS date FROM log;

CREATE VIEW silver_attempts AS
SELECT *,
    epoch_us(reserved_at) - epoch_us(run_at) AS wait_us,
    epoch_us(ended_at) - epoch_us(reserved_at) AS run_us,
    CASE WHEN reserved_at IS NOT NULL THEN least(ended_at, lease_expires_at) END AS valid_until
FROM bronze_attempts;

CREATE VIEW silver_lifecycles AS
SELECT *,
    CASE WHEN state IN ('done', 'dead', 'cancelled') THEN last_ended_at END AS finished_at,
    CASE WHEN state IN ('done', 'dead', 'cancelled') THEN epoch_us(last_ended_at) - epoch_us(created_at) END AS total_us,
    CASE WHEN state IN ('done', 'cancelled') THEN last_ended_at::DATE END AS date
FROM (
    SELECT source, job_id, created_at,
        arg_min(queue, seq) AS queue, arg_min(type, seq) AS type, arg_min_null(key, seq) AS key,
        arg_min(run_at, seq) AS first_run_at, arg_max(priority, seq) AS priority,
        arg_max(ended_at, seq) AS last_ended_at, arg_max(state, seq) AS state,
        arg_min(reserved_at, seq) AS first_reserved_at, arg_min(wait_us, seq) AS first_wait_us,
        count(reserved_at) AS executions,
        coalesce(sum(wait_us), 0) AS total_wait_us, coalesce(sum(run_us), 0) AS total_run_us,
        count(*) FILTER (outcome = 'done') AS done, count(*) FILTER (outcome = 'retried') AS retried,
        count(*) FILTER (outcome = 'dead') AS dead, count(*) FILTER (outcome = 'expired') AS expired,
        count(*) FILTER (outcome = 'released') AS released, count(*) FILTER (outcome = 'cancelled') AS cancelled,
        count(*) FILTER (outcome = 'merged') AS merged, count(*) FILTER (outcome = 'requeued') AS requeued,
        max(fence) AS max_fence, max(seq) AS last_seq,
        arg_max(error_type, seq) AS last_error_type, arg_max(error_message, seq) AS last_error_message
    FROM silver_attempts GROUP BY ALL
);

CREATE VIEW gold_minutes AS
WITH spread AS (
    SELECT *, unnest(CASE
        WHEN reserved_at IS NULL THEN [epoch_us(ended_at) // 60000000]
        ELSE list_distinct(range(epoch_us(reserved_at) // 60000000, epoch_us(greatest(valid_until, reserved_at)) // 60000000 + 1)
            || [epoch_us(ended_at) // 60000000]) END) AS bucket
    FROM silver_attempts
), cells AS (
    SELECT source, queue, type, bucket, 0 AS arrivals,
        (bucket = epoch_us(reserved_at) // 60000000)::INT AS starts,
        CASE WHEN bucket = epoch_us(ended_at) // 60000000 THEN outcome END AS outcome,
        CASE WHEN bucket = epoch_us(ended_at) // 60000000 THEN state END AS state,
        CASE WHEN reserved_at IS NULL THEN 0
            ELSE greatest(least(epoch_us(valid_until), (bucket + 1) * 60000000)
                - greatest(epoch_us(reserved_at), bucket * 60000000), 0) END AS busy_us,
        CASE WHEN bucket = epoch_us(reserved_at) // 60000000 THEN wait_us END AS wait_us,
        CASE WHEN bucket = epoch_us(ended_at) // 60000000 THEN run_us END AS run_us
    FROM spread
    UNION ALL
    SELECT source, queue, type, epoch_us(created_at) // 60000000, 1, 0, NULL, NULL, 0, NULL, NULL FROM silver_lifecycles
)
SELECT source, queue, type, make_timestamptz(bucket * 60000000) AS minute,
    sum(arrivals) AS arrivals, coalesce(sum(starts), 0) AS starts,
    count(*) FILTER (outcome = 'done') AS completions, count(*) FILTER (state = 'dead') AS failures,
    count(*) FILTER (outcome = 'retried') AS retries, count(*) FILTER (outcome = 'expired') AS expiries,
    count(*) FILTER (outcome = 'released') AS releases, count(*) FILTER (outcome = 'cancelled') AS cancellations,
    count(*) FILTER (outcome = 'requeued') AS requeues,
    count(*) FILTER (state IN ('done', 'dead', 'cancelled') AND outcome <> 'requeued') AS finished,
    coalesce(sum(busy_us), 0) AS busy_us,
    quantile_disc(wait_us, 0.5) AS wait_p50_us, quantile_disc(wait_us, 0.99) AS wait_p99_us,
    quantile_disc(run_us, 0.5) AS run_p50_us, quantile_disc(run_us, 0.99) AS run_p99_us
FROM cells GROUP BY ALL;

CREATE VIEW gold_hours AS
SELECT source, queue, type, date_trunc('hour', minute) AS hour, sum(arrivals) AS arrivals, sum(starts) AS starts,
    sum(completions) AS completions, sum(failures) AS failures, sum(retries) AS retries, sum(expiries) AS expiries,
    sum(releases) AS releases, sum(cancellations) AS cancellations, sum(requeues) AS requeues, sum(finished) AS finished,
    sum(busy_us) AS busy_us
FROM gold_minutes GROUP BY ALL;

CREATE VIEW gold_queue_minutes AS
SELECT source, queue, minute, sum(busy_us) AS busy_us,
    sum(sum(arrivals) + sum(requeues) - sum(finished)) OVER (PARTITION BY source, queue ORDER BY minute) AS waiting
FROM gold_minutes GROUP BY source, queue, minute;

CREATE VIEW gold_workers AS
SELECT source, worker, date_trunc('hour', ended_at) AS hour, count(*) AS executions
FROM silver_attempts WHERE worker IS NOT NULL AND reserved_at IS NOT NULL GROUP BY ALL;

CREATE VIEW gold_errors AS
SELECT source, queue, type, error_type, count(*) AS count, min(ended_at) AS first_seen, max(ended_at) AS last_seen
FROM silver_attempts WHERE error_type IS NOT NULL GROUP BY source, queue, type, error_type, error_message;

CREATE VIEW gold_ticks AS
SELECT source, job_id, split_part(job_id, ':', 1) AS made_by, split_part(job_id, ':', 2) AS schedule,
    min(created_at) AS made, min(reserved_at) AS actual, arg_max(outcome, seq) AS outcome, max(seq) AS last_seq, created_at::DATE AS date
FROM silver_attempts WHERE job_id LIKE 'tick:%' GROUP BY ALL;

CREATE VIEW gold_objectives AS
SELECT source, 'soon' AS objective, date_trunc('hour', ended_at) AS hour,
    count(*) AS total, count(*) FILTER (wait_us > 1000000) AS bad
FROM silver_attempts WHERE reserved_at IS NOT NULL GROUP BY ALL;

CREATE VIEW state_backlog_days AS
SELECT source, queue, minute::DATE AS date, sum(arrivals) + sum(requeues) - sum(finished) AS change
FROM gold_minutes GROUP BY ALL;

-- No row of these histories fails a check.
CREATE VIEW quarantine_attempts AS SELECT source, seq FROM log WHERE false;
