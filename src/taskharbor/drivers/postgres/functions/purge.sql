CREATE OR REPLACE FUNCTION purge(p_queue text, p_states smallint[], p_types text[], p_key text, p_before bigint, p_limit integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_one record;
    v_removed integer := 0;
BEGIN
    FOR v_one IN
        SELECT q.id, s.state FROM queues AS q, unnest(p_states) AS s(state)
        WHERE p_queue IS NULL OR q.name = p_queue ORDER BY q.id, s.state
    LOOP
        v_removed := v_removed + remove_ended(
            CASE WHEN v_one.state = 5 THEN 'dead' ELSE 'finished' END::regclass,
            v_one.id, v_one.state, p_before, p_limit - v_removed, p_types, p_key);
    END LOOP;
    RETURN v_removed;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;
