-- End up to p_limit leases of a queue that are over, from p_low on. Skips what somebody else is working on.
CREATE OR REPLACE FUNCTION reclaim_queue(p_queue_id integer, p_low bigint, p_now bigint, p_limit integer, p_stir integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_job jobs;
    v_ended integer := 0;
BEGIN
    FOR v_job IN
        SELECT * FROM jobs
        WHERE queue_id = p_queue_id AND state = 3 AND coalesce(expires_at, run_at) BETWEEN p_low AND p_now
        ORDER BY coalesce(expires_at, run_at) LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM expire(v_job, p_now, p_stir);
        v_ended := v_ended + 1;
    END LOOP;
    RETURN v_ended;
END $$;
