CREATE OR REPLACE FUNCTION purge(p_queue text, p_states smallint[], p_types text[], p_key text, p_before bigint, p_limit integer)
RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RETURN remove_rows('ended', format(
        'j.state = ANY (%1$L) AND (%2$L IS NULL OR j.finished_at < %2$L) AND (%3$L IS NULL OR q.name = %3$L)
         AND (%4$L IS NULL OR j.type = ANY (%4$L)) AND (%5$L IS NULL OR j.key = %5$L)', p_states, p_before, p_queue, p_types, p_key), p_limit);
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;
