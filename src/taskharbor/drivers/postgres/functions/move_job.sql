-- End a job's lease, or end a job without one. p_held: the job before; the caller holds its row lock. p_job: the job afterwards,
-- by its state: 1, it waits again and absorbs a blocked job of its key; 4, 5, 6, it has ended, a blocked job of its key may run,
-- and the failure queue is served.
CREATE OR REPLACE FUNCTION move_job(
    p_held jobs, p_job jobs, p_outcome integer, p_now bigint, p_stir integer,
    p_error_type text DEFAULT NULL, p_error_message text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_was_leased boolean := p_held.state = 3;
    v_has_ended boolean := p_job.state > 3;
    -- `now` may have been read before the lease began.
    v_ended_at bigint := greatest(p_now, p_held.reserved_at);
    v_blocked jobs;
    v_after jobs;
BEGIN
    IF v_was_leased AND p_held.key IS NOT NULL THEN
        SELECT * INTO v_blocked FROM jobs
        WHERE queue_id = p_held.queue_id AND key = p_held.key AND state = 2 FOR UPDATE;
        v_after := v_blocked;
    END IF;
    IF NOT v_has_ended THEN
        p_job := changed_by(p_job, v_blocked, v_blocked.flags);
        p_job.state := state_by_run_at(p_job.run_at, p_now);
    END IF;
    PERFORM log_attempt(p_held, p_outcome, p_job.state, v_ended_at, p_error_type, p_error_message);
    IF NOT v_has_ended AND v_blocked.seq IS NOT NULL THEN
        v_after.state := 6;
        v_after.merged_into := p_job.id;
        PERFORM move_job(v_blocked, v_after, 6, p_now, p_stir);
    END IF;
    p_job.token := NULL;
    p_job.worker := NULL;
    p_job.reserved_at := NULL;
    p_job.expires_at := NULL;
    p_job.progress := NULL;
    p_job.cancel_requested := false;
    IF v_has_ended THEN
        p_job.finished_at := v_ended_at;
        DELETE FROM jobs WHERE id = p_job.id;
        INSERT INTO ended SELECT p_job.*;
    ELSE
        PERFORM update_job(p_job);
    END IF;
    PERFORM note(
        p_held.state, p_job,
        CASE WHEN NOT v_has_ended THEN p_stir WHEN v_was_leased THEN stir_by_room(p_job.queue_id, p_stir) ELSE 0 END,
        CASE WHEN v_was_leased THEN least(v_ended_at, p_held.expires_at) END);
    IF v_has_ended AND v_blocked.seq IS NOT NULL THEN
        v_after.state := state_by_run_at(v_blocked.run_at, p_now);
        PERFORM update_job(v_after);
        PERFORM note(2, v_after, p_stir);
    END IF;
    IF p_job.state = 5 THEN
        PERFORM serve_failure_queue(p_job, p_now, p_stir);
    END IF;
END $$;
