-- Per job the state it is in now, or -1 not found, -2 not dead, -3 its key waits already.
CREATE OR REPLACE FUNCTION requeue(p_ids text[], p_now bigint, p_stir integer, p_is_repeated boolean) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_answers smallint[] := '{}';
    v_id text;
    v_dead jobs;
    v_job jobs;
BEGIN
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock(queue_id, key) AS number FROM dead WHERE id = ANY (p_ids) AND key IS NOT NULL ORDER BY 1
    ) AS l;
    FOREACH v_id IN ARRAY p_ids LOOP
        SELECT * INTO v_dead FROM dead WHERE id = v_id FOR UPDATE;
        IF NOT FOUND AND p_is_repeated AND EXISTS (
            -- The answer to the first try was lost, and this is what it wrote.
            SELECT FROM attempts WHERE job_id = v_id AND outcome = 7 AND ended_at = p_now
        ) THEN
            v_answers := v_answers || coalesce((SELECT state FROM jobs WHERE id = v_id), 1::smallint);
            CONTINUE;
        ELSIF NOT FOUND THEN
            v_answers := v_answers || CASE WHEN is_kept(v_id) THEN -2 ELSE -1 END::smallint;
            CONTINUE;
        END IF;
        BEGIN
            -- Stored first and looked around then, as in store_job: so nobody comes in between.
            v_job := v_dead;
            v_job.state := 1;
            v_job.run_at := p_now;
            v_job.attempts := 0;
            v_job.stalls := 0;
            v_job.finished_at := NULL;
            INSERT INTO jobs SELECT v_job.*;
        EXCEPTION WHEN unique_violation THEN
            v_answers := v_answers || -3::smallint;
            CONTINUE;
        END;
        IF v_job.key IS NOT NULL THEN
            PERFORM FROM jobs WHERE queue_id = v_job.queue_id AND key = v_job.key AND state = 3 FOR KEY SHARE;
            IF FOUND THEN
                UPDATE jobs SET state = 2 WHERE id = v_job.id;
                v_job.state := 2;
            END IF;
        END IF;
        DELETE FROM dead WHERE seq = v_dead.seq;
        PERFORM log_attempt(v_job, 7, v_job.state, p_now);
        PERFORM note(5, v_job, p_stir);
        v_answers := v_answers || v_job.state;
    END LOOP;
    RETURN v_answers;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off;
