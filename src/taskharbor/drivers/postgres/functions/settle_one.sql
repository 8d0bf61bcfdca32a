-- One settlement of any kind, by the contract's rules. 0 done; 1 not found, 2 not inflight, 3 mismatch, 4 expired. p_what: see
-- `settle`.
CREATE OR REPLACE FUNCTION settle_one(
    p_id text, p_seq bigint, p_secret text, p_what jsonb, p_now bigint, p_stir integer, p_is_repeated boolean
) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    v_type text := coalesce(p_what ->> 'type', 'ack');
    v_error jsonb := coalesce(p_what -> 'error', p_what -> 'reason');
    v_held jobs;
    v_job jobs;
    v_state smallint;
BEGIN
    -- FOR UPDATE, although less would do for the change: it waits for a caller that adds a job which this one blocks.
    SELECT * INTO v_held FROM jobs WHERE id = p_id AND state + 0 = 3 AND token = p_secret AND seq = p_seq FOR UPDATE;
    IF NOT FOUND THEN
        -- A token that is gone does not come back, so the present holder's row is not locked.
        SELECT * INTO v_held FROM jobs WHERE id = p_id;
    END IF;
    IF p_is_repeated AND v_type IN ('retry', 'release') AND (v_held.token = p_secret) IS NOT TRUE AND EXISTS (
        -- The answer to the first try was lost, and this is its effect.
        SELECT FROM attempts WHERE job_id = p_id AND outcome IN (1, 4, 5)
        AND (ended_at = p_now OR ended_at > p_now AND ended_at = reserved_at)
    ) THEN
        RETURN 0;
    END IF;
    IF v_held.seq IS NULL THEN
        SELECT state INTO v_state FROM ended WHERE id = p_id;
        -- Terminal idempotence: a repeated end succeeds.
        RETURN CASE WHEN v_state IS NULL THEN 1
                    WHEN v_type = 'ack' AND v_state = 4 OR v_type = 'fail' AND v_state IN (4, 5)
                         OR v_type = 'discard' AND v_state = 6 THEN 0
                    ELSE 2 END;
    ELSIF v_held.state <> 3 THEN
        RETURN 2;
    ELSIF v_held.token <> p_secret OR v_held.seq <> p_seq THEN
        RETURN 3;
    ELSIF v_held.expires_at <= p_now THEN
        RETURN 4;
    END IF;
    v_job := v_held;
    v_job.state := CASE v_type WHEN 'ack' THEN 4 WHEN 'fail' THEN 5 WHEN 'discard' THEN 6
                               ELSE CASE WHEN v_job.cancel_requested THEN 6 ELSE 1 END END;
    v_job.result := decode(p_what ->> 'result', 'base64');
    IF v_error ? 'type' THEN
        -- As `Failure.text` has it.
        v_job.last_error := concat_ws(E'\n', concat_ws(': ', v_error ->> 'type', nullif(v_error ->> 'message', '')),
                                      nullif(v_error ->> 'detail', ''));
    END IF;
    IF v_type IN ('retry', 'fail') THEN
        v_job.attempts := p_what ->> 'attempts';
        v_job.failed_at := p_now;
    END IF;
    IF v_job.state = 1 THEN
        v_job.run_at := coalesce((p_what ->> 'run_at_us')::bigint, v_job.run_at);
    END IF;
    PERFORM move_job(
        v_held, v_job, CASE v_job.state WHEN 4 THEN 0 WHEN 5 THEN 2 WHEN 6 THEN 5 ELSE CASE v_type WHEN 'retry' THEN 1 ELSE 4 END END,
        p_now, p_stir, v_error ->> 'type', v_error ->> 'message');
    RETURN 0;
END $$;
