-- Remove ended jobs by id, for an operator. Also returns the states of the jobs that have not ended.
CREATE OR REPLACE FUNCTION remove_jobs(p_ids text[]) RETURNS TABLE (id text, state smallint) LANGUAGE plpgsql AS $$
DECLARE
    v_ended text[] := ARRAY(SELECT e.id FROM ended AS e WHERE e.id = ANY (p_ids) FOR UPDATE);
BEGIN
    RETURN QUERY SELECT e.id, e.state FROM ended AS e WHERE e.id = ANY (v_ended)
        UNION ALL SELECT j.id, j.state FROM jobs AS j WHERE j.id = ANY (p_ids);
    PERFORM remove_rows('ended', format('j.id = ANY (%L)', v_ended));
END $$ SET search_path FROM CURRENT;
