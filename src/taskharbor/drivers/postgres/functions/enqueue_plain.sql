-- Store jobs without keys and idempotency keys, with new ids. If an id is known, unique_violation is raised, nothing has
-- happened, and the caller uses the rules.
CREATE OR REPLACE FUNCTION enqueue_plain(p_batch job_batch, p_now bigint, p_stir integer, p_new_ids boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_jobs bigint := store_batch(p_batch, p_now, p_stir);
BEGIN
    -- In a later snapshot than the INSERT's, so that jobs that ended meanwhile are seen. A job does not end before it was made,
    -- so only the latest days are searched; the hour is for clocks that differ.
    IF p_new_ids THEN
        IF EXISTS (SELECT FROM repeated WHERE call = ANY (p_batch.ids)) THEN
            RAISE unique_violation USING MESSAGE = 'a later try has stored this batch';
        END IF;
    ELSIF EXISTS (
        SELECT FROM ended WHERE id = ANY (p_batch.ids)
            AND finished_at >= (SELECT min(c) FROM unnest(p_batch.created_ats) AS c) - 3600000000
    ) THEN
        RAISE unique_violation USING MESSAGE = 'a job of this batch is known and has ended';
    END IF;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan;
