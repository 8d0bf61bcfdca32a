-- Ticks that were due when their schedule was worked on, and have a job neither in the log nor in the store.
-- :slack  seconds by which clocks may differ
WITH rows AS (
    SELECT source, queue, job_id, ended_at FROM {attempts} UNION ALL SELECT source, queue, job_id, ended_at FROM {later}
), logs AS (
    SELECT source, queue, min(ended_at) AS oldest, max(max(ended_at)) OVER (PARTITION BY source) AS newest_end
    FROM rows GROUP BY source, queue
), known AS (
    SELECT source, job_id FROM rows WHERE job_id LIKE 'tick:%' UNION ALL SELECT source, id FROM {jobs} WHERE id LIKE 'tick:%'
)
SELECT *,
    -- As for `done_without_row`: all rows of such a job are in the log, if it has ended.
    reserved_at >= oldest + make_dt_interval(0, 0, 0, :slack) AND ended_at < newest_end - make_dt_interval(0, 1) AS tick_lost
FROM {due} AS due JOIN logs USING (source, queue) LEFT ANTI JOIN known USING (source, job_id)
