-- The tables of the pipeline, from the Parquet files of a log (`log`), in one DuckDB process.
-- Statements end with a semicolon at the end of a line.
CREATE TABLE bronze AS SELECT *, 'log' AS source, 1 AS run, now() AS ingested_at, ended_at::DATE AS date FROM log;

CREATE TABLE silver AS
SELECT * EXCLUDE (run, ingested_at),
    epoch_us(reserved_at) - epoch_us(run_at) AS wait_us,
    epoch_us(ended_at) - epoch_us(reserved_at) AS run_us,
    CASE WHEN reserved_at IS NOT NULL THEN least(ended_at, lease_expires_at) END AS valid_until
FROM bronze QUALIFY row_number() OVER (PARTITION BY seq) = 1;

CREATE TABLE lifecycles AS
SELECT source, job_id, created_at,
    arg_min(queue, seq) AS queue, arg_min(type, seq) AS type, arg_min(key, seq) AS key, arg_min(run_at, seq) AS first_run_at,
    arg_max(priority, seq) AS priority, arg_max(ended_at, seq) AS last_ended_at, arg_max(state, seq) AS state,
    min(reserved_at) AS first_reserved_at, arg_min(wait_us, seq) AS first_wait_us,
    count(reserved_at) AS executions, sum(wait_us) AS total_wait_us, sum(run_us) AS total_run_us,
    count(*) FILTER (outcome = 'done') AS done, count(*) FILTER (outcome = 'retried') AS retried,
    count(*) FILTER (outcome = 'dead') AS dead, count(*) FILTER (outcome = 'expired') AS expired,
    count(*) FILTER (outcome = 'released') AS released, count(*) FILTER (outcome = 'cancelled') AS cancelled,
    count(*) FILTER (outcome = 'merged') AS merged, count(*) FILTER (outcome = 'requeued') AS requeued,
    max(fence) AS max_fence, max(seq) AS last_seq,
    arg_max(error_type, seq) AS last_error_type, arg_max(error_message, seq) AS last_error_message
FROM silver GROUP BY ALL;

CREATE TABLE minutes AS
WITH spread AS (
    SELECT *, unnest(CASE
        WHEN reserved_at IS NULL THEN [epoch_us(ended_at) // 60000000]
        ELSE list_distinct(range(epoch_us(reserved_at) // 60000000, epoch_us(greatest(valid_until, reserved_at)) // 60000000 + 1)
            || [epoch_us(ended_at) // 60000000]) END) AS bucket
    FROM silver
), cells AS (
    SELECT source, queue, type, bucket, 0 AS arrivals,
        (bucket = epoch_us(reserved_at) // 60000000)::INT AS starts,
        CASE WHEN bucket = epoch_us(ended_at) // 60000000 THEN outcome END AS outcome,
        CASE WHEN bucket = epoch_us(ended_at) // 60000000 THEN state END AS state,
        greatest(least(epoch_us(valid_until), (bucket + 1) * 60000000)
            - greatest(epoch_us(reserved_at), bucket * 60000000), 0) AS busy_us,
        CASE WHEN bucket = epoch_us(reserved_at) // 60000000 THEN wait_us END AS wait_us,
        CASE WHEN bucket = epoch_us(ended_at) // 60000000 THEN run_us END AS run_us
    FROM spread
    UNION ALL
    SELECT source, queue, type, epoch_us(created_at) // 60000000, 1, 0, NULL, NULL, 0, NULL, NULL FROM lifecycles
)
SELECT source, queue, type, make_timestamptz(bucket * 60000000) AS minute,
    sum(arrivals) AS arrivals, sum(starts) AS starts,
    count(*) FILTER (outcome = 'done') AS completions, count(*) FILTER (state = 'dead') AS failures,
    count(*) FILTER (outcome = 'retried') AS retries, count(*) FILTER (outcome = 'expired') AS expiries,
    count(*) FILTER (outcome = 'released') AS releases, count(*) FILTER (outcome = 'cancelled') AS cancellations,
    count(*) FILTER (outcome = 'requeued') AS requeues,
    count(*) FILTER (state IN ('done', 'dead', 'cancelled') AND outcome <> 'requeued') AS finished,
    sum(busy_us) AS busy_us,
    quantile_disc(wait_us, [0.5, 0.95, 0.99]) AS wait, quantile_disc(run_us, [0.5, 0.95, 0.99]) AS run
FROM cells GROUP BY ALL;

CREATE TABLE hours AS
SELECT source, queue, type, date_trunc('hour', reserved_at) AS hour,
    quantile_disc(wait_us, [0.5, 0.95, 0.99]) AS wait, quantile_disc(run_us, [0.5, 0.95, 0.99]) AS run
FROM silver GROUP BY ALL;

CREATE TABLE queue_minutes AS
SELECT source, queue, minute, sum(busy_us) / 6e7 AS concurrency,
    sum(sum(arrivals) + sum(requeues) - sum(finished)) OVER (PARTITION BY source, queue ORDER BY minute) AS waiting
FROM minutes GROUP BY source, queue, minute;

CREATE TABLE workers AS
SELECT source, worker, date_trunc('hour', ended_at) AS hour, count(*) AS executions, sum(run_us) AS busy_us
FROM silver WHERE worker IS NOT NULL GROUP BY ALL;

CREATE TABLE errors AS
SELECT source, queue, type, error_type, regexp_replace(error_message, '[0-9]+', '<n>', 'g') AS fingerprint,
    count(*) AS count, min(ended_at) AS first_seen, max(ended_at) AS last_seen, arg_min(job_id, ended_at) AS sample_job
FROM silver WHERE error_type IS NOT NULL GROUP BY ALL;

CREATE TABLE objectives AS
SELECT source, date_trunc('hour', ended_at) AS hour, count(*) AS total, count(*) FILTER (wait_us > 60000000) AS bad
FROM silver WHERE reserved_at IS NOT NULL GROUP BY ALL;
