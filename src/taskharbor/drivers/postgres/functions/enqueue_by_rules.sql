-- Store jobs of any kind, in order. p_jobs: objects with the given columns of `jobs`, and `queue`. p_is_repeated: an earlier try
-- may have stored them, or may try later: from now on it may not. If the snapshot of the caller's transaction is fixed
-- (REPEATABLE READ, SERIALIZABLE), later jobs of a key cannot be seen, so no rule about keys can be kept. Then nothing is done,
-- and no row comes back.
CREATE OR REPLACE FUNCTION enqueue_by_rules(
    p_jobs json, p_payloads bytea, p_ends integer[], p_now bigint, p_stir integer, p_is_repeated boolean
) RETURNS TABLE (job_id text, existed boolean) LANGUAGE plpgsql AS $$
DECLARE
    v_given record;
    v_new jobs := json_populate_record(NULL::jobs, '{"fence": 0, "attempts": 0, "stalls": 0, "cancel_requested": false}');
    v_job jobs;
    v_answer record;
    v_known text;
    v_last integer := (SELECT coalesce(max(id), 0) FROM queues);
    v_used integer[] := '{}';
    v_queues jsonb := (
        SELECT jsonb_object_agg(n.name, queue_id_of(n.name))
        FROM (SELECT DISTINCT g ->> 'queue' AS name FROM json_array_elements(p_jobs) AS g ORDER BY 1) AS n);
    v_seqs bigint[] := ARRAY(SELECT nextval('job_seq') FROM json_array_elements(p_jobs));
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
       AND EXISTS (SELECT FROM json_array_elements(p_jobs) AS g WHERE g ->> 'key' IS NOT NULL) THEN
        RETURN;
    END IF;
    -- In the same order for all callers, so that two batches do not wait for each other.
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock((v_queues ->> (g ->> 'queue'))::integer, g ->> 'key') AS number
        FROM json_array_elements(p_jobs) AS g WHERE g ->> 'key' IS NOT NULL ORDER BY 1
    ) AS l;
    -- The inflight jobs of these keys, which may block the new ones, in the order in which settling locks them.
    PERFORM FROM jobs AS j
    WHERE j.key IS NOT NULL AND j.state = 3 AND (j.queue_id, j.key) IN (
        SELECT (v_queues ->> (g ->> 'queue'))::integer, g ->> 'key' FROM json_array_elements(p_jobs) AS g)
    ORDER BY j.seq FOR KEY SHARE OF j;
    -- Each idempotency key gets a row for the first job that has it, in the same order for all callers. The key comes first in
    -- that order: a sort by a number that most rows share compares all texts in full. If another open transaction has put a row
    -- there, this waits for it.
    INSERT INTO idempotency (queue_id, idempotency_key, job_seq, job_id)
    SELECT DISTINCT ON (2, 1) (v_queues ->> (g.value ->> 'queue'))::integer, (g.value ->> 'idempotency_key') COLLATE "C",
           v_seqs[g.ordinality], g.value ->> 'id'
    FROM json_array_elements(p_jobs) WITH ORDINALITY AS g
    WHERE g.value ->> 'idempotency_key' IS NOT NULL ORDER BY 2, 1, g.ordinality
    ON CONFLICT DO NOTHING;
    FOR v_given IN
        SELECT g.value, g.ordinality AS n FROM json_array_elements(p_jobs) WITH ORDINALITY AS g ORDER BY g.ordinality
    LOOP
        v_job := json_populate_record(v_new, v_given.value);
        v_job.queue_id := (v_queues ->> (v_given.value ->> 'queue'))::integer;
        v_job.payload := substring(p_payloads FROM p_ends[v_given.n] + 1
                                   FOR p_ends[v_given.n + 1] - p_ends[v_given.n]);
        v_job.seq := v_seqs[v_given.n];
        job_id := v_job.id;
        existed := is_kept(v_job.id);
        IF NOT existed AND v_job.idempotency_key IS NOT NULL THEN
            SELECT i.job_id INTO v_known FROM idempotency AS i
            WHERE i.queue_id = v_job.queue_id AND i.idempotency_key = v_job.idempotency_key;
            IF FOUND AND v_known <> v_job.id AND NOT is_kept(v_known) THEN
                -- It leads to a removed job. The first caller that finds that lets it lead to its own job.
                SELECT i.job_id INTO v_known FROM idempotency AS i
                WHERE i.queue_id = v_job.queue_id AND i.idempotency_key = v_job.idempotency_key FOR UPDATE;
            END IF;
            IF FOUND AND v_known <> v_job.id AND is_kept(v_known) THEN
                job_id := v_known;
                existed := true;
            END IF;
        END IF;
        IF NOT existed THEN
            v_answer := store_job(v_job, p_now, p_stir);
            job_id := v_answer.job_id;
            existed := v_answer.existed;
            v_used := v_used || CASE WHEN existed THEN '{}' ELSE ARRAY[v_job.queue_id] END;
            IF v_job.idempotency_key IS NOT NULL AND v_answer.job_seq IS NOT NULL THEN
                INSERT INTO idempotency AS i (queue_id, idempotency_key, job_seq, job_id, is_led)
                VALUES (v_job.queue_id, v_job.idempotency_key, v_answer.job_seq, v_answer.job_id, existed)
                ON CONFLICT (queue_id, idempotency_key)
                DO UPDATE SET job_seq = excluded.job_seq, job_id = excluded.job_id, is_led = excluded.is_led
                WHERE i.job_seq <> excluded.job_seq;
            END IF;
        END IF;
        IF v_job.idempotency_key IS NOT NULL AND existed THEN
            -- Remove the row of a job that was not stored.
            DELETE FROM idempotency
            WHERE queue_id = v_job.queue_id AND idempotency_key = v_job.idempotency_key AND job_seq = v_job.seq;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF p_is_repeated THEN
        INSERT INTO repeated (call, try) SELECT g ->> 'id', 1 FROM json_array_elements(p_jobs) AS g
        ON CONFLICT (call) DO NOTHING;
    END IF;
    -- A queue that was only named and made here: every job for it was known before, elsewhere.
    DELETE FROM queues WHERE id > v_last AND id <> ALL (v_used) AND xmin = pg_current_xact_id()::xid;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
   SET plan_cache_mode = force_generic_plan;
