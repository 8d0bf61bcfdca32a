-- Make the jobs of these tasks visible and remove those of all others. Returns the number of new jobs. p_id_head and a number of
-- eight hexadecimal digits make an id that no other job has.
CREATE OR REPLACE FUNCTION publish_write(
    p_write text, p_series text, p_number bigint, p_tasks text[], p_now bigint, p_stir integer, p_id_head text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_missing text;
    v_locks bigint;
    v_chunk staged;
    v_added bigint;
    v_seen bigint := 0;
    v_jobs bigint := 0;
    v_are_new boolean;
BEGIN
    -- A caller that publishes the same write at the same moment waits here, and then finds it published.
    PERFORM pg_advisory_xact_lock(write_lock(p_write));
    INSERT INTO published AS p (series, number, jobs) VALUES (p_series, p_number, 0)
    ON CONFLICT (series) DO UPDATE SET number = excluded.number, portion = excluded.portion, published_at = excluded.published_at, jobs = 0
    WHERE p.number < excluded.number;
    IF NOT FOUND THEN
        DELETE FROM staged WHERE write = p_write;
        RETURN (SELECT CASE WHEN number = p_number THEN coalesce(jobs, 0) ELSE 0 END FROM published WHERE series = p_series);
    END IF;

    SELECT string_agg(m.task, ', ') INTO v_missing FROM (
        SELECT unnest(p_tasks) AS task
        EXCEPT SELECT s.task FROM staged AS s WHERE s.write = p_write GROUP BY s.task
               HAVING max(s.number) FILTER (WHERE s.is_last) = count(*) - 1
    ) AS m;
    IF v_missing IS NOT NULL THEN
        RAISE EXCEPTION 'what the tasks % of this write had staged is gone', v_missing USING ERRCODE = 'TH001';
    END IF;
    DELETE FROM staged WHERE write = p_write AND (is_last OR task <> ALL (p_tasks));

    -- A lock for every key, until the end of the transaction, is too much for the server's shared table of locks. A write with so
    -- many keys takes one lock for all keys instead. All other callers with keys wait for it.
    SELECT sum(s.locks) INTO v_locks FROM staged AS s WHERE s.write = p_write;
    IF v_locks > current_setting('max_locks_per_transaction')::bigint * current_setting('max_connections')::bigint / 2 THEN
        PERFORM lock_all_keys();
    END IF;
    -- Jobs with keys first, in the order in which all callers take locks.
    FOR v_chunk IN
        SELECT * FROM staged AS s WHERE s.write = p_write AND s.by_rules IS NOT NULL
        ORDER BY array_position(p_tasks, s.task), s.number
    LOOP
        SELECT count(*) FILTER (WHERE NOT e.existed) INTO v_added
        FROM enqueue_by_rules(v_chunk.by_rules, (v_chunk.batch).payloads, (v_chunk.batch).ends, p_now, p_stir, false) AS e;
        v_jobs := v_jobs + v_added;
    END LOOP;
    PERFORM queue_id_of(n.queue) FROM (
        SELECT DISTINCT (s.batch).queue FROM staged AS s WHERE s.write = p_write AND s.by_rules IS NULL ORDER BY 1
    ) AS n;
    v_are_new := claim_idempotency_keys(p_write, p_tasks);
    FOR v_chunk IN
        SELECT * FROM staged AS s WHERE s.write = p_write AND s.by_rules IS NULL
        ORDER BY array_position(p_tasks, s.task), s.number
    LOOP
        v_jobs := v_jobs + store_batch(v_chunk.batch, p_now, p_stir, v_chunk.seqs, v_are_new, p_id_head, v_seen);
        v_seen := v_seen + v_chunk.jobs;
    END LOOP;

    DELETE FROM staged WHERE write = p_write;
    UPDATE published SET jobs = v_jobs WHERE series = p_series;
    -- Remove staged jobs of dead writers, and writes that nobody will publish again.
    DELETE FROM staged WHERE write IN (
        SELECT write FROM staged GROUP BY write HAVING max(staged_at) < clock_timestamp() - interval '3 days');
    DELETE FROM published
    WHERE published_at < clock_timestamp() - CASE WHEN number < 0 THEN interval '30 days' ELSE interval '400 days' END;
    RETURN v_jobs;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan;
