-- Returns per job its state, or -1 not found, -2 finished. p_only_waiting: inflight jobs are not marked.
CREATE OR REPLACE FUNCTION cancel_jobs(p_ids text[], p_now bigint, p_only_waiting boolean, p_stir integer) RETURNS smallint[]
LANGUAGE plpgsql AS $$
DECLARE
    v_answers smallint[] := '{}';
    v_id text;
    v_job jobs;
    v_after jobs;
    v_state smallint;
BEGIN
    -- In the order of `settle`: inflight jobs before the jobs that they block.
    PERFORM FROM jobs WHERE id = ANY (p_ids) ORDER BY state < 3, key IS NOT NULL, seq FOR UPDATE;
    FOREACH v_id IN ARRAY p_ids LOOP
        SELECT * INTO v_job FROM jobs WHERE id = v_id FOR UPDATE;
        IF FOUND AND v_job.state = 3 THEN
            UPDATE jobs SET cancel_requested = true WHERE id = v_id AND NOT p_only_waiting;
            v_state := 3;
        ELSIF FOUND THEN
            v_after := v_job;
            v_after.state := 6;
            PERFORM move_job(v_job, v_after, 5, p_now, p_stir);
            v_state := 6;
        ELSE
            v_state := coalesce((SELECT CASE e.state WHEN 6 THEN 6 ELSE -2 END FROM ended AS e WHERE e.id = v_id), -1);
        END IF;
        v_answers := v_answers || v_state;
    END LOOP;
    RETURN v_answers;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off;
