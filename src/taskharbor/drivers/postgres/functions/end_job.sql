-- A job's end: done, dead or cancelled. It leaves `jobs`, a blocked job of its key may run, the failure queue is served.
-- p_job carries the final counters and error; it still has the lease that ends. Whoever calls this, and the other transitions of
-- one job, holds the row lock of the job.
CREATE OR REPLACE FUNCTION end_job(
    p_job jobs, p_state integer, p_outcome integer, p_now bigint, p_stir integer,
    p_error_type text DEFAULT NULL, p_error_message text DEFAULT NULL,
    p_result bytea DEFAULT NULL, p_merged_into text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_ended_at bigint := log_attempt(p_job, p_outcome, p_state, p_now, p_error_type, p_error_message);
    v_was integer := p_job.state;
    v_freed jobs;
BEGIN
    DELETE FROM jobs WHERE id = p_job.id;
    INSERT INTO ended (seq, run_at, created_at, finished_at, failed_at, timeout_us, backoff_min_us, backoff_max_us,
                       fence, queue_id, max_attempts, max_stalls, attempts, stalls, rank, state, flags, id, type, key,
                       codec, headers, idempotency_key, last_error, merged_into, result, payload)
    VALUES (p_job.seq, p_job.run_at, p_job.created_at, v_ended_at, p_job.failed_at, p_job.timeout_us,
            p_job.backoff_min_us, p_job.backoff_max_us, p_job.fence, p_job.queue_id, p_job.max_attempts,
            p_job.max_stalls, p_job.attempts, p_job.stalls, p_job.rank, p_state, p_job.flags, p_job.id, p_job.type,
            p_job.key, p_job.codec, p_job.headers, p_job.idempotency_key, p_job.last_error, p_merged_into, p_result,
            p_job.payload);
    p_job.state := p_state;
    PERFORM note(v_was, p_job, CASE WHEN v_was = 3 THEN stir_by_room(p_job.queue_id, p_stir) ELSE 0 END,
                 CASE WHEN v_was = 3 THEN least(v_ended_at, p_job.expires_at) END);
    IF v_was = 3 AND p_job.key IS NOT NULL THEN
        UPDATE jobs SET state = state_by_run_at(run_at, p_now)
        WHERE queue_id = p_job.queue_id AND key = p_job.key AND state = 2
        RETURNING * INTO v_freed;
        IF FOUND THEN
            PERFORM note(2, v_freed, p_stir);
        END IF;
    END IF;
    IF p_state = 5 THEN
        PERFORM serve_failure_queue(p_job, p_now, p_stir);
    END IF;
END $$;
