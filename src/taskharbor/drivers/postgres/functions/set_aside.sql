-- Mend jobs that have values which no call can store. Those that have not ended are dead then.
CREATE OR REPLACE FUNCTION set_aside(p_ids text[], p_now bigint, p_stir integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    c_type CONSTANT text := 'DamagedJob';
    c_message CONSTANT text := 'some values of the stored job could not be loaded';
    v_held jobs;
    v_job jobs;
BEGIN
    FOR v_held IN
        UPDATE jobs SET
            id = CASE WHEN length(trim(id)) BETWEEN 1 AND 200 THEN id ELSE 'damaged-' || seq END,
            type = coalesce(nullif(trim(left(type, 200)), ''), 'damaged'), headers = NULL, flags = NULL,
            max_attempts = greatest(0, least(max_attempts, 1000000)), attempts = greatest(0, least(attempts, 1000000)),
            stalls = greatest(0, least(stalls, 1000000)), fence = greatest(0, least(fence, 1::bigint << 53)),
            run_at = greatest(0, least(run_at, 9007199254740991)), created_at = greatest(0, least(created_at, 9007199254740991))
        WHERE id = ANY (p_ids) RETURNING *
    LOOP
        v_job := v_held;
        v_job.state := 5;
        v_job.failed_at := p_now;
        v_job.last_error := c_type || ': ' || c_message;
        PERFORM move_job(v_held, v_job, 2, p_now, p_stir, c_type, c_message);
    END LOOP;
    UPDATE ended SET headers = NULL, flags = NULL WHERE id = ANY (p_ids);
END $$ SET search_path FROM CURRENT;
