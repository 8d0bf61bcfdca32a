-- A lease that is over: the job goes back to its place, or ends where it has stalled too often.
CREATE OR REPLACE FUNCTION expire(p_held jobs, p_now bigint, p_stir integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_job jobs := p_held;
    v_type CONSTANT text := 'LeaseExpired';
    v_message CONSTANT text := 'the lease expired before the job was settled (worker lost or stalled)';
BEGIN
    v_job.stalls := v_job.stalls + 1;
    IF v_job.cancel_requested THEN
        PERFORM end_job(v_job, 6, 3, p_now, p_stir, v_type, v_message);
    ELSIF v_job.attempts + v_job.stalls >= v_job.max_attempts OR v_job.stalls >= v_job.max_stalls THEN
        v_job.last_error := v_type || ': ' || v_message;
        PERFORM end_job(v_job, 5, 3, p_now, p_stir, v_type, v_message);
    ELSE
        PERFORM back_to_waiting(p_held, v_job, 3, p_now, p_stir, v_type, v_message);
    END IF;
END $$;
