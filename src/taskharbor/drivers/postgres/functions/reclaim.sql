-- End up to p_limit expired leases of a queue (NULL: of any), from p_low on. Returns their number. Jobs that another call has
-- locked are skipped. The job goes back to its place, or ends if it has stalled too often.
CREATE OR REPLACE FUNCTION reclaim(p_queue text, p_low bigint, p_now bigint, p_limit integer, p_stir integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_type CONSTANT text := 'LeaseExpired';
    v_message CONSTANT text := 'the lease expired before the job was settled (worker lost or stalled)';
    v_held jobs;
    v_job jobs;
    v_ended integer := 0;
BEGIN
    FOR v_held IN
        SELECT due.* FROM queues AS q CROSS JOIN LATERAL (
            SELECT * FROM jobs AS j
            WHERE j.queue_id = q.id AND j.state = 3 AND coalesce(j.expires_at, j.run_at) BETWEEN p_low AND p_now
            ORDER BY coalesce(j.expires_at, j.run_at) LIMIT p_limit FOR UPDATE SKIP LOCKED
        ) AS due
        WHERE p_queue IS NULL OR q.name = p_queue LIMIT p_limit
    LOOP
        v_job := v_held;
        v_job.stalls := v_job.stalls + 1;
        v_job.state := 1;
        IF v_job.cancel_requested THEN
            v_job.state := 6;
        ELSIF v_job.attempts + (CASE WHEN v_job.max_stalls IS NULL THEN v_job.stalls ELSE 0 END) >= v_job.max_attempts
            OR v_job.stalls >= v_job.max_stalls THEN
            v_job.state := 5;
            v_job.last_error := v_type || ': ' || v_message;
        END IF;
        PERFORM move_job(v_held, v_job, 3, p_now, p_stir, v_type, v_message);
        v_ended := v_ended + 1;
    END LOOP;
    RETURN v_ended;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan;
