CREATE OR REPLACE FUNCTION reclaim(p_queue text, p_now bigint, p_limit integer, p_stir integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer;
    v_ended integer := 0;
BEGIN
    FOR v_queue IN SELECT id FROM queues WHERE p_queue IS NULL OR name = p_queue ORDER BY id LOOP
        EXIT WHEN v_ended >= p_limit;
        v_ended := v_ended + reclaim_queue(v_queue, -1, p_now, p_limit - v_ended, p_stir);
    END LOOP;
    RETURN v_ended;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan;
