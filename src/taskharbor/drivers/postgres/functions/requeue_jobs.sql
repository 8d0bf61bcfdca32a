-- Returns per job its state, or -1 not found, -2 not dead, -3 its key waits already. p_run_at: NULL for now.
CREATE OR REPLACE FUNCTION requeue_jobs(
    p_ids text[], p_now bigint, p_run_at bigint, p_keep_counts boolean, p_stir integer, p_is_repeated boolean
) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_answers smallint[] := '{}';
    v_id text;
    v_job jobs;
    v_existed boolean;
BEGIN
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock(queue_id, key) AS number FROM dead WHERE id = ANY (p_ids) AND key IS NOT NULL ORDER BY 1
    ) AS l;
    FOREACH v_id IN ARRAY p_ids LOOP
        SELECT * INTO v_job FROM dead WHERE id = v_id FOR UPDATE;
        IF NOT FOUND THEN
            v_answers := v_answers || CASE
                -- The answer to the first try was lost, and this is its effect.
                WHEN p_is_repeated AND EXISTS (SELECT FROM attempts WHERE job_id = v_id AND outcome = 7 AND ended_at = p_now)
                THEN coalesce((SELECT state FROM jobs WHERE id = v_id), 1)
                WHEN is_kept(v_id) THEN -2 ELSE -1 END::smallint;
            CONTINUE;
        END IF;
        BEGIN
            DELETE FROM dead WHERE seq = v_job.seq;
            v_job.run_at := coalesce(p_run_at, p_now);
            IF NOT p_keep_counts THEN
                v_job.attempts := 0;
                v_job.stalls := 0;
            END IF;
            v_job.finished_at := NULL;
            SELECT s.existed INTO v_existed FROM store_job(v_job, p_now, p_stir) AS s;
            IF v_existed THEN
                RAISE unique_violation;
            END IF;
        EXCEPTION WHEN unique_violation THEN
            v_answers := v_answers || -3::smallint;
            CONTINUE;
        END;
        SELECT * INTO v_job FROM jobs WHERE id = v_id;
        INSERT INTO moves (queue_id, dead) VALUES (v_job.queue_id, -1);
        PERFORM log_attempt(v_job, 7, v_job.state, p_now);
        v_answers := v_answers || v_job.state;
    END LOOP;
    RETURN v_answers;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off;
