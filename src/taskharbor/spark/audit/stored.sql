-- One row for each job in the log or in the store, with a condition for each kind of violation.
-- :before  jobs that were due earlier should have been claimed; NULL: none
-- :slack   seconds by which clocks may differ
WITH rows AS (
    SELECT *, true AS is_earlier FROM {attempts} UNION ALL SELECT *, false FROM {later}
), lives AS (
    SELECT source, job_id,
        max_by(struct(queue, fence, outcome, state, ended_at, created_at), IF(is_earlier, seq, NULL)) AS last,
        max_by(struct(fence, state, ended_at, created_at), seq) AS newest,
        bool_or(state = 'done') AS has_done,
        -- A released lease spends nothing. Somebody who is thrown out of a lease may release it any number of times.
        count_if(is_earlier AND reserved_at IS NOT NULL AND outcome IN ('done', 'retried', 'dead', 'cancelled')) AS runs,
        count_if(is_earlier AND outcome = 'expired') AS expiries,
        count_if(is_earlier AND outcome = 'requeued') AS requeues
    FROM rows GROUP BY source, job_id, created_at
), logs AS (
    SELECT source, queue, min(IF(is_earlier, ended_at, NULL)) AS oldest, max(ended_at) AS latest,
        max(max(ended_at)) OVER (PARTITION BY source) AS newest_end
    FROM rows GROUP BY source, queue
), kept AS (
    SELECT source, id AS job_id, struct(
        queue, key, state, fence, created_at, run_at, finished_at, attempts, stalls, max_attempts, max_stalls
    ) AS job FROM {jobs}
), beside AS (
    SELECT *, coalesce(job.queue, last.queue) AS queue, coalesce(last.fence, job.fence) AS fence, last.ended_at,
        job.created_at = last.created_at AS is_same,
        newest IS NULL OR newest.created_at = job.created_at AS is_told,
        -- An operator may requeue a dead job with fresh counts. A request with the same key may also change a job's bounds.
        greatest(job.max_attempts, 1) * (1 + requeues) AS most_runs,
        job.max_stalls * (1 + requeues) AS most_stalls,
        greatest(job.run_at, job.created_at, newest.ended_at) AS due
    FROM lives FULL JOIN kept USING (source, job_id)
)
SELECT beside.*,
    job IS NULL AND last IS NOT NULL AND NOT last.state IN ('done', 'dead', 'cancelled')
        AND NOT newest.state IN ('done', 'dead', 'cancelled') AS lost_job,
    is_same AND (
        job.fence < last.fence
        OR job.fence = last.fence AND job.state = 'inflight'
        -- Only `dead` can be left, by a requeue that the log as it was read may not have had yet.
        OR last.state IN ('done', 'cancelled') AND job.state <> last.state
    ) AS store_contradicts_log,
    -- A handler may end its job as dead at any time. An expired lease does so only if the executions are used up.
    is_same AND last.outcome = 'expired' AND last.state = 'dead' AND job.state = 'dead' AND job.fence = last.fence
        AND job.attempts + IF(job.max_stalls = 0, job.stalls, 0) < job.max_attempts
        AND (job.max_stalls = 0 OR job.stalls < job.max_stalls) AS died_too_early,
    is_same AND job.key IS NULL AND (
        runs + IF(job.max_stalls = 0, expiries, 0) > most_runs OR job.max_stalls > 0 AND expiries > most_stalls
    ) AS too_many_executions,
    -- Retention has removed no row of a job that is younger than the oldest row of its queue. New rows of PostgreSQL's log are read
    -- only when no older transaction is open any more: an hour later they have been.
    job.state = 'done' AND is_told AND NOT coalesce(has_done, false)
        AND job.created_at >= oldest + make_dt_interval(0, 0, 0, :slack)
        AND job.finished_at < newest_end - make_dt_interval(0, 1) AS done_without_row,
    -- A job with a key may have waited for another of its key. A queue with a limit that ends leases works as fast as it may.
    job.state IN ('ready', 'scheduled') AND job.key IS NULL AND is_told AND job.fence = coalesce(newest.fence, 0)
        AND due < :before AND NOT coalesce(paused, false)
        AND (max_inflight IS NULL OR inflight < max_inflight AND coalesce(latest < :before, true)) AS left_waiting
FROM beside LEFT JOIN logs USING (source, queue) LEFT JOIN {queues} USING (source, queue)
