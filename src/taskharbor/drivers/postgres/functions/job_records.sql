-- All jobs as they are read, wherever they are kept. What ended has no lease, and what has not has no end.
CREATE OR REPLACE VIEW job_records AS
SELECT q.name AS queue, j.*
FROM (
    SELECT seq, run_at, created_at, NULL::bigint AS finished_at, failed_at, timeout_us, backoff_min_us, backoff_max_us, fence,
           queue_id, max_attempts, max_stalls, attempts, stalls, rank, state, flags, id, type, key, codec, headers,
           idempotency_key, last_error, NULL::text AS merged_into, NULL::bytea AS result, payload,
           reserved_at, expires_at, token, worker, progress, cancel_requested
    FROM jobs
    UNION ALL
    SELECT seq, run_at, created_at, finished_at, failed_at, timeout_us, backoff_min_us, backoff_max_us, fence,
           queue_id, max_attempts, max_stalls, attempts, stalls, rank, state, flags, id, type, key, codec, headers,
           idempotency_key, last_error, merged_into, result, payload, NULL, NULL, NULL, NULL, NULL, false
    FROM ended
) AS j JOIN queues AS q ON q.id = j.queue_id;
