-- Mend jobs that have values which no call can store. Those that have not ended are dead then, with the message.
CREATE OR REPLACE FUNCTION set_aside(p_ids text[], p_now bigint, p_stir integer, p_message text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    c_type CONSTANT text := 'DamagedJob';
    v_held jobs;
    v_job jobs;
    v_ended integer := 0;
BEGIN
    FOR v_held IN SELECT * FROM jobs WHERE id = ANY (p_ids) ORDER BY seq FOR UPDATE LOOP
        v_job := v_held;
        v_job.id := CASE WHEN length(trim(v_held.id)) BETWEEN 1 AND 200 THEN v_held.id ELSE 'damaged-' || v_held.seq END;
        v_job.type := coalesce(nullif(trim(left(v_held.type, 200)), ''), 'damaged');
        v_job.headers := NULL;
        v_job.flags := NULL;
        v_job.timeout_us := NULL;
        v_job.backoff_min_us := NULL;
        v_job.backoff_max_us := NULL;
        v_job.max_attempts := least(greatest(v_held.max_attempts, 0), 1000000);
        v_job.attempts := least(greatest(v_held.attempts, 0), 1000000);
        v_job.stalls := least(greatest(v_held.stalls, 0), 1000000);
        v_job.fence := least(greatest(v_held.fence, 0), 9007199254740991);
        v_job.run_at := least(greatest(v_held.run_at, -9007199254740991), 9007199254740991);
        v_job.created_at := least(greatest(v_held.created_at, -9007199254740991), 9007199254740991);
        UPDATE jobs SET id = v_job.id, fence = v_job.fence, created_at = v_job.created_at WHERE id = v_held.id;
        v_held.id := v_job.id;
        v_held.type := v_job.type;
        v_job.state := 5;
        v_job.failed_at := p_now;
        v_job.last_error := c_type || ': ' || p_message;
        PERFORM move_job(v_held, v_job, 2, p_now, p_stir, c_type, p_message);
        v_ended := v_ended + 1;
    END LOOP;
    UPDATE ended SET headers = NULL, flags = NULL WHERE id = ANY (p_ids);
    RETURN v_ended;
END $$ SET search_path FROM CURRENT;
