-- The lease ends, the job does not: it waits again and absorbs a blocked job of its key.
-- p_held is the job as it was leased, p_job as it is to be.
CREATE OR REPLACE FUNCTION back_to_waiting(
    p_held jobs, p_job jobs, p_outcome integer, p_now bigint, p_stir integer, p_error_type text, p_error_message text
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_blocked jobs;
    v_ended_at bigint;
BEGIN
    IF p_held.key IS NOT NULL THEN
        SELECT * INTO v_blocked FROM jobs
        WHERE queue_id = p_held.queue_id AND key = p_held.key AND state = 2 FOR UPDATE;
        IF FOUND THEN
            p_job := changed_by(p_job, v_blocked, v_blocked.flags);
        END IF;
    END IF;
    p_job.state := state_by_run_at(p_job.run_at, p_now);
    v_ended_at := log_attempt(p_held, p_outcome, p_job.state, p_now, p_error_type, p_error_message);
    IF v_blocked.seq IS NOT NULL THEN
        PERFORM end_job(v_blocked, 6, 6, p_now, p_stir, p_merged_into => p_job.id);
    END IF;
    UPDATE jobs SET
        state = p_job.state, run_at = p_job.run_at, type = p_job.type, payload = p_job.payload, codec = p_job.codec,
        headers = p_job.headers, timeout_us = p_job.timeout_us, max_attempts = p_job.max_attempts,
        max_stalls = p_job.max_stalls, backoff_min_us = p_job.backoff_min_us, backoff_max_us = p_job.backoff_max_us,
        attempts = p_job.attempts, stalls = p_job.stalls, last_error = p_job.last_error, failed_at = p_job.failed_at,
        token = NULL, worker = NULL, reserved_at = NULL, expires_at = NULL, progress = NULL, cancel_requested = false
    WHERE id = p_job.id;
    PERFORM note(3, p_job, p_stir, least(v_ended_at, p_held.expires_at));
END $$;
