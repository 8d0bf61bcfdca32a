-- Cancel the waiting job of each key, and the inflight one unless p_only_waiting. Returns the number of jobs per key.
-- p_is_repeated: an earlier try of this call may have taken effect. Then its rows in the log count.
CREATE OR REPLACE FUNCTION cancel_keys(
    p_keys text[], p_queue text, p_now bigint, p_only_waiting boolean, p_stir integer, p_is_repeated boolean
) RETURNS integer[] LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := (SELECT id FROM queues WHERE name = p_queue);
    v_counts integer[] := '{}';
    v_key text;
    v_ids text[];
    v_cancelled text[];
BEGIN
    -- In the order of `enqueue_by_rules` and `cancel_jobs`. With these locks no job is added to the keys, and no job of them
    -- changes its state.
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock(v_queue, k.key) AS number FROM unnest(p_keys) AS k(key) ORDER BY 1
    ) AS l;
    PERFORM FROM jobs WHERE queue_id = v_queue AND key = ANY (p_keys) ORDER BY state < 3, seq FOR UPDATE;
    v_cancelled := ARRAY(
        SELECT key FROM attempts
        WHERE p_is_repeated AND queue_id = v_queue AND key = ANY (p_keys) AND outcome = 5 AND reserved_at IS NULL AND ended_at = p_now);
    FOREACH v_key IN ARRAY p_keys LOOP
        v_ids := ARRAY(
            SELECT id FROM jobs WHERE queue_id = v_queue AND key = v_key AND (state < 3 OR NOT p_only_waiting));
        PERFORM cancel_jobs(v_ids, p_now, p_only_waiting, p_stir);
        v_counts := v_counts || least(2, cardinality(v_ids) + (v_key = ANY (v_cancelled))::integer);
    END LOOP;
    RETURN v_counts;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off;
