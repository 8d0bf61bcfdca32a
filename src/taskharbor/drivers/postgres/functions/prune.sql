-- Apply retention row by row, to rows that belong to no day, and to dead jobs. Returns the number of removed rows.
CREATE OR REPLACE FUNCTION prune(p_now bigint, p_limit integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_jobs bigint := remove_rows('finished_rest', format('j.finished_at <= %s - q.keep_done_us', p_now), p_limit);
BEGIN
    RETURN v_jobs + remove_rows('dead', format('j.finished_at <= %s - q.keep_dead_us', p_now), p_limit - v_jobs)
        + remove_rows('attempts_rest', format('j.ended_at <= %s - q.keep_attempts_us', p_now), p_limit);
END $$ SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
   SET enable_mergejoin = off SET jit = off;
REVOKE EXECUTE ON FUNCTION prune(bigint, integer) FROM PUBLIC;
