-- Change the settings that p_changes names. With `declaration`, nothing changes if the stored one is the same.
CREATE OR REPLACE FUNCTION change_settings(p_queue text, p_changes jsonb, p_stir integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := queue_id_of(p_queue);
BEGIN
    -- No claim is under way while the settings change: it would use the old ones.
    PERFORM pg_advisory_xact_lock(queue_lock(v_queue));
    UPDATE queues AS q SET
        (paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us, declaration) = (
            SELECT n.paused, n.max_inflight, n.failure_queue, n.keep_done_us, n.keep_dead_us, n.keep_attempts_us, n.declaration
            FROM jsonb_populate_record(q, p_changes) AS n)
    WHERE q.id = v_queue AND (q.declaration = p_changes ->> 'declaration') IS NOT TRUE;
    IF FOUND THEN
        INSERT INTO moves (queue_id, stir) VALUES (v_queue, p_stir);
        PERFORM tell_waiters(v_queue, p_stir);
    END IF;
END $$ SET search_path FROM CURRENT;
