CREATE OR REPLACE FUNCTION configure(
    p_queue text, p_paused boolean, p_max_inflight integer, p_failure_queue text, p_keep_done_us bigint, p_keep_dead_us bigint,
    p_keep_attempts_us bigint, p_stir integer
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := queue_id_of(p_queue);
BEGIN
    -- No claim is under way while the settings change: it would use the old ones.
    PERFORM pg_advisory_xact_lock(queue_lock(v_queue));
    UPDATE queues SET paused = p_paused, max_inflight = p_max_inflight, failure_queue = p_failure_queue,
                      keep_done_us = p_keep_done_us, keep_dead_us = p_keep_dead_us, keep_attempts_us = p_keep_attempts_us
    WHERE id = v_queue;
    INSERT INTO moves (queue_id, stir) VALUES (v_queue, p_stir);
    PERFORM tell_waiters(v_queue, p_stir);
END $$ SET search_path FROM CURRENT;
