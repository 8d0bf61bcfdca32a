-- Write all columns of a job that can change before its end, except a new lease.
CREATE OR REPLACE FUNCTION update_job(p_job jobs) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE jobs SET
        state = p_job.state, rank = p_job.rank, run_at = p_job.run_at, type = p_job.type, payload = p_job.payload, codec = p_job.codec,
        headers = p_job.headers, timeout_us = p_job.timeout_us, max_attempts = p_job.max_attempts,
        max_stalls = p_job.max_stalls, backoff_min_us = p_job.backoff_min_us, backoff_max_us = p_job.backoff_max_us,
        attempts = p_job.attempts, stalls = p_job.stalls, last_error = p_job.last_error, failed_at = p_job.failed_at,
        flags = p_job.flags, token = p_job.token, worker = p_job.worker, reserved_at = p_job.reserved_at,
        expires_at = p_job.expires_at, progress = p_job.progress, cancel_requested = p_job.cancel_requested
    WHERE id = p_job.id;
END $$;
