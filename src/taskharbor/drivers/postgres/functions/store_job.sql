-- Rules 3 to 5 for one job. Returns the id of the job that will do the work and whether it was there before.
CREATE OR REPLACE FUNCTION store_job(
    p_job jobs, p_now bigint, p_stir integer, OUT job_id text, OUT job_seq bigint, OUT existed boolean
) LANGUAGE plpgsql AS $$
DECLARE
    v_waiting jobs;
    v_was integer;
    v_seq bigint;
    v_flags smallint := coalesce(p_job.flags, 1);
BEGIN
    LOOP
        p_job.state := state_by_run_at(p_job.run_at, p_now);
        IF p_job.key IS NOT NULL THEN
            SELECT * INTO v_waiting FROM jobs
            WHERE queue_id = p_job.queue_id AND key = p_job.key AND state <= 2 FOR UPDATE;
            IF FOUND THEN
                v_was := v_waiting.state;
                v_waiting := changed_by(v_waiting, p_job, v_flags);
                IF v_was = 2 THEN
                    -- One more request for a job that will be merged or run later: no flag is dropped.
                    v_waiting.flags := ((coalesce(v_waiting.flags, 1) | v_flags) & ~24)
                        | (CASE WHEN v_flags & 24 = 0 THEN coalesce(v_waiting.flags, 1) ELSE v_flags END & 24);
                ELSE
                    v_waiting.state := state_by_run_at(v_waiting.run_at, p_now);
                END IF;
                PERFORM update_job(v_waiting);
                PERFORM note(v_was, v_waiting, CASE WHEN v_was = 2 THEN 0 ELSE p_stir END);
                job_id := v_waiting.id;
                job_seq := v_waiting.seq;
                existed := true;
                RETURN;
            END IF;
            -- Held until this transaction ends: a caller that settles the inflight job must find the job that it blocks.
            -- Heartbeats do not conflict with this kind of lock.
            PERFORM FROM jobs WHERE queue_id = p_job.queue_id AND key = p_job.key AND state = 3 FOR KEY SHARE;
            IF FOUND THEN
                p_job.state := 2;
                p_job.flags := v_flags;
            END IF;
        END IF;
        BEGIN
            INSERT INTO jobs SELECT p_job.*
            ON CONFLICT (id) DO NOTHING RETURNING seq INTO v_seq;
        EXCEPTION WHEN unique_violation THEN
            -- The inflight job of this key has just gone back to waiting: look again.
            CONTINUE;
        END;
        job_id := p_job.id;
        job_seq := v_seq;
        existed := v_seq IS NULL;
        IF existed THEN
            RETURN;
        END IF;
        IF p_job.key IS NOT NULL AND p_job.state <> 2 THEN
            -- Between the two looks the inflight job may have gone back to waiting, and been claimed again before this one was
            -- stored. From now on it cannot: this job has the place of the key among the waiting jobs.
            PERFORM FROM jobs WHERE queue_id = p_job.queue_id AND key = p_job.key AND state = 3 FOR KEY SHARE;
            IF FOUND THEN
                DELETE FROM jobs WHERE id = p_job.id;
                CONTINUE;
            END IF;
        END IF;
        IF EXISTS (SELECT FROM ended WHERE id = p_job.id) THEN
            -- It was there, ran and ended between the two looks.
            DELETE FROM jobs WHERE id = p_job.id;
            existed := true;
            RETURN;
        END IF;
        PERFORM note(NULL, p_job, CASE WHEN p_job.state = 2 THEN 0 ELSE p_stir END);
        RETURN;
    END LOOP;
END $$;
