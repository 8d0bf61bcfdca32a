-- Numbers of the log, with the first and the last of their rows.
WITH numbers AS (
    SELECT source, seq, count(*) AS times, min(facts) AS one, max(facts) AS other
    FROM (SELECT source, seq, struct(job_id, fence, queue, ended_at) AS facts FROM {attempts}) GROUP BY source, seq
)
SELECT *, one.job_id, one.fence, one.queue, times > 1 AS duplicate_row FROM numbers
