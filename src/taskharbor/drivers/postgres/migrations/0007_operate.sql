-- The operator's changes: cancel, requeue, settings, removal.

-- Per job the state it is in now, or -1 not found, -2 finished.
CREATE FUNCTION cancel(p_ids text[], p_now bigint, p_stir smallint) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_answers smallint[] := '{}';
    v_id text;
    v_job jobs;
    v_state smallint;
BEGIN
    -- In the order of `settle`, running jobs before those that wait for them.
    PERFORM FROM jobs WHERE id = ANY (p_ids) ORDER BY state < 3, key IS NOT NULL, seq FOR UPDATE;
    FOREACH v_id IN ARRAY p_ids LOOP
        SELECT * INTO v_job FROM jobs WHERE id = v_id FOR UPDATE;
        IF FOUND AND v_job.state = 3 THEN
            UPDATE jobs SET cancel_requested = true WHERE id = v_id;
            v_state := 3;
        ELSIF FOUND THEN
            PERFORM end_job(v_job, 6::smallint, 5::smallint, p_now, p_stir);
            v_state := 6;
        ELSIF EXISTS (SELECT FROM finished WHERE id = v_id AND state = 6) THEN
            v_state := 6;
        ELSE
            v_state := CASE WHEN is_kept(v_id) THEN -2 ELSE -1 END;
        END IF;
        v_answers := v_answers || v_state;
    END LOOP;
    RETURN v_answers;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off;

-- Per job the state it is in now, or -1 not found, -2 not dead, -3 its key waits already.
CREATE FUNCTION requeue(p_ids text[], p_now bigint, p_stir smallint, p_again boolean) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_answers smallint[] := '{}';
    v_id text;
    v_dead dead;
    v_job jobs;
BEGIN
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock(queue_id, 'key', key) AS number FROM dead WHERE id = ANY (p_ids) AND key IS NOT NULL ORDER BY 1
    ) AS l;
    FOREACH v_id IN ARRAY p_ids LOOP
        SELECT * INTO v_dead FROM dead WHERE id = v_id FOR UPDATE;
        IF NOT FOUND AND p_again AND EXISTS (
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
            INSERT INTO jobs (seq, run_at, created_at, failed_at, timeout_us, backoff_min_us, backoff_max_us, fence, queue_id,
                              max_attempts, max_stalls, rank, state, flags, id, type, key, codec, headers, idempotency_key,
                              last_error, payload)
            VALUES (v_dead.seq, p_now, v_dead.created_at, v_dead.failed_at, v_dead.timeout_us, v_dead.backoff_min_us,
                    v_dead.backoff_max_us, v_dead.fence, v_dead.queue_id, v_dead.max_attempts, v_dead.max_stalls, v_dead.rank,
                    1, v_dead.flags, v_dead.id, v_dead.type, v_dead.key, v_dead.codec, v_dead.headers,
                    v_dead.idempotency_key, v_dead.last_error, v_dead.payload)
            RETURNING * INTO v_job;
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
        PERFORM log_attempt(v_job, 7::smallint, v_job.state, p_now, NULL, NULL);
        PERFORM note(v_job.queue_id, 5::smallint, v_job.state, p_stir, v_job.rank, v_job.run_at, NULL);
        v_answers := v_answers || v_job.state;
    END LOOP;
    RETURN v_answers;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off;

CREATE FUNCTION configure(
    p_queue text, p_paused boolean, p_max_inflight integer, p_failure_queue text, p_keep_done_us bigint, p_keep_dead_us bigint,
    p_keep_attempts_us bigint, p_stir smallint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := queue_id_of(p_queue);
BEGIN
    -- No claim is under way while the settings change, or it would go by those of before.
    PERFORM pg_advisory_xact_lock(queue_lock(v_queue));
    UPDATE queues SET paused = p_paused, max_inflight = p_max_inflight, failure_queue = p_failure_queue,
                      keep_done_us = p_keep_done_us, keep_dead_us = p_keep_dead_us, keep_attempts_us = p_keep_attempts_us
    WHERE id = v_queue;
    PERFORM note(v_queue, NULL, NULL, p_stir, NULL, NULL, NULL);
END $$ SET search_path FROM CURRENT;

-- Remove up to p_limit jobs that ended before an instant, with what belongs to them. How many went.
-- p_table: `dead`, `finished`, or one part of it.
CREATE FUNCTION remove_ended(
    p_table regclass, p_queue_id integer, p_state smallint, p_before bigint, p_limit integer,
    p_types text[] DEFAULT NULL, p_key text DEFAULT NULL
) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_seqs bigint[];
    v_keys text[];
BEGIN
    IF p_limit < 1 OR p_before IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format(
        'WITH chosen AS MATERIALIZED (
             SELECT j.seq, j.finished_at, j.tableoid AS part, j.ctid AS place FROM %1$s AS j
             WHERE j.queue_id = $1 AND j.state = $2 AND j.finished_at < $3
               AND ($4 IS NULL OR j.type = ANY ($4)) AND ($5 IS NULL OR j.key = $5)
             LIMIT $6 FOR UPDATE SKIP LOCKED
         ), gone AS (
             DELETE FROM %1$s AS j USING chosen AS c
             WHERE j.ctid = c.place AND j.tableoid = c.part AND j.seq = c.seq AND j.finished_at = c.finished_at
             RETURNING j.seq, j.idempotency_key
         ) SELECT array_agg(seq), array_agg(idempotency_key) FROM gone', p_table)
    INTO v_seqs, v_keys USING p_queue_id, p_state, p_before, p_types, p_key, p_limit;
    IF v_seqs IS NULL THEN
        RETURN 0;
    END IF;
    DELETE FROM idempotency AS i USING unnest(v_seqs, v_keys) AS g(seq, key)
    WHERE i.queue_id = p_queue_id AND i.idempotency_key = g.key AND i.job_seq = g.seq;
    DELETE FROM idempotency WHERE is_led AND job_seq = ANY (v_seqs);
    INSERT INTO moves (queue_id, done, dead, cancelled)
    SELECT p_queue_id, -(p_state = 4)::int * c, -(p_state = 5)::int * c, -(p_state = 6)::int * c
    FROM cardinality(v_seqs) AS c;
    RETURN cardinality(v_seqs);
END $$;

CREATE FUNCTION purge(p_queue text, p_states smallint[], p_types text[], p_key text, p_before bigint, p_limit integer)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_one record;
    v_removed integer := 0;
BEGIN
    FOR v_one IN
        SELECT q.id, s.state FROM queues AS q, unnest(p_states) AS s(state)
        WHERE p_queue IS NULL OR q.name = p_queue ORDER BY q.id, s.state
    LOOP
        v_removed := v_removed + remove_ended(
            CASE WHEN v_one.state = 5 THEN 'dead' ELSE 'finished' END::regclass,
            v_one.id, v_one.state, p_before, p_limit - v_removed, p_types, p_key);
    END LOOP;
    RETURN v_removed;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;
