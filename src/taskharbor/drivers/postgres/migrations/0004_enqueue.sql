-- Storing new jobs. A plain batch is one INSERT; keyed and idempotent jobs go through the contract's five rules one by one.
-- Payloads come as one value with the places where they end: an array of a thousand byte strings costs more to build.

-- Jobs of one queue without keys and idempotency keys, with ids never seen before. Where one was, unique_violation is
-- raised, nothing has happened, and the caller goes by the rules. What is the same for all comes once, what is not as an array.
CREATE FUNCTION enqueue_plain(
    p_queue text, p_ids text[],
    p_type text, p_types text[], p_run_at bigint, p_run_ats bigint[], p_created_at bigint, p_created_ats bigint[],
    p_priority smallint, p_priorities smallint[], p_max_attempts integer, p_headers text, p_headers_each text[],
    p_codec text, p_timeout_us bigint, p_max_stalls integer, p_backoff_min_us bigint, p_backoff_max_us bigint, p_flags smallint,
    p_payloads bytea, p_ends integer[], p_now bigint, p_stir smallint, p_new_ids boolean
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := queue_id_of(p_queue);
    v_created bigint := p_created_at;
BEGIN
    IF v_created IS NULL THEN
        v_created := (SELECT min(c) FROM unnest(p_created_ats) AS c);
    END IF;
    WITH added AS (
        INSERT INTO jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, headers, payload,
                          codec, timeout_us, max_stalls, backoff_min_us, backoff_max_us, flags)
        SELECT g.id, v_queue, coalesce(g.type, p_type), coalesce(g.run_at, p_run_at), coalesce(g.created_at, p_created_at),
               -coalesce(g.priority, p_priority), p_max_attempts,
               CASE WHEN coalesce(g.run_at, p_run_at) > p_now THEN 0 ELSE 1 END,
               coalesce(g.headers, p_headers), substring(p_payloads FROM g.starts + 1 FOR g.ends - g.starts),
               p_codec, p_timeout_us, p_max_stalls, p_backoff_min_us, p_backoff_max_us, p_flags
        FROM unnest(p_ids, p_types, p_run_ats, p_created_ats, p_priorities, p_headers_each,
                    p_ends[:cardinality(p_ends) - 1], p_ends[2:])
             AS g(id, type, run_at, created_at, priority, headers, starts, ends)
        RETURNING rank, run_at, state
    )
    INSERT INTO moves (queue_id, scheduled, ready, stir, ranks, low_run_at, high_run_at)
    SELECT v_queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1), p_stir,
           array_agg(DISTINCT rank), min(run_at), max(run_at) FILTER (WHERE state = 1)
    FROM added;
    PERFORM tell_waiters(v_queue, p_stir);
    -- Only now, in a later snapshot than the INSERT's: whoever ended meanwhile is seen here. A job does not end before it was
    -- made, so that only the latest days are searched; the hour is for clocks that disagree.
    IF p_new_ids THEN
        IF EXISTS (SELECT FROM repeated WHERE call = ANY (p_ids)) THEN
            RAISE unique_violation USING MESSAGE = 'a later try has stored this batch';
        END IF;
    ELSIF EXISTS (SELECT FROM dead WHERE id = ANY (p_ids))
       OR EXISTS (SELECT FROM finished WHERE id = ANY (p_ids) AND finished_at >= v_created - 3600000000) THEN
        RAISE unique_violation USING MESSAGE = 'a job of this batch is known and has ended';
    END IF;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan;

-- At random, and not by one: a replica that was promoted without the last ones must not come to a number that somebody knows.
CREATE FUNCTION note_repetition() RETURNS void LANGUAGE sql
SECURITY DEFINER SET search_path FROM CURRENT
AS $$ SELECT setval('repeats', 1 + (random() * 9e18)::bigint) $$;
SELECT note_repetition();

-- The planner writes it in where it is used; to read the sequence like a table costs three times as much.
CREATE FUNCTION last_repetition() RETURNS bigint LANGUAGE sql RETURN pg_sequence_last_value('repeats'::regclass);

-- For new ids (see `sql/enqueue.sql`), called once the job is stored: whatever ended before that is seen here. No search path
-- of its own, which would cost a single enqueue more than the look.
CREATE FUNCTION check_not_repeated(p_id text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM $schema.repeated WHERE call = p_id) THEN
        RAISE unique_violation USING MESSAGE = 'a later try has stored this job';
    END IF;
    RETURN true;
END $$;

-- Whether a job is known, wherever it is kept.
CREATE FUNCTION is_kept(p_id text) RETURNS boolean LANGUAGE sql STABLE
RETURN EXISTS (SELECT FROM jobs WHERE id = p_id)
    OR EXISTS (SELECT FROM dead WHERE id = p_id)
    OR EXISTS (SELECT FROM finished WHERE id = p_id);

-- Rules 3 to 5 for one job. Returns the id of the job that will do the work and whether it was there before.
CREATE FUNCTION store_job(
    p_job jobs, p_now bigint, p_stir smallint, OUT job_id text, OUT job_seq bigint, OUT existed boolean
) LANGUAGE plpgsql AS $$
DECLARE
    v_waiting jobs;
    v_was smallint;
    v_seq bigint;
    v_flags smallint := coalesce(p_job.flags, 1);
BEGIN
    LOOP
        IF p_job.key IS NOT NULL THEN
            SELECT * INTO v_waiting FROM jobs
            WHERE queue_id = p_job.queue_id AND key = p_job.key AND state <= 2 FOR UPDATE;
            IF FOUND THEN
                v_was := v_waiting.state;
                v_waiting := changed_by(v_waiting, p_job, v_flags);
                IF v_was = 2 THEN
                    -- One more wish for a job that will be merged or run later: no flag is dropped.
                    v_waiting.flags := (coalesce(v_waiting.flags, 1) & 7) | (v_flags & 7)
                        | CASE WHEN v_flags >> 3 = 0 THEN coalesce(v_waiting.flags, 1) & 24 ELSE v_flags & 24 END;
                ELSE
                    v_waiting.state := state_by_run_at(v_waiting.run_at, p_now);
                END IF;
                UPDATE jobs SET
                    state = v_waiting.state, run_at = v_waiting.run_at, type = v_waiting.type, payload = v_waiting.payload,
                    codec = v_waiting.codec, headers = v_waiting.headers, timeout_us = v_waiting.timeout_us,
                    max_attempts = v_waiting.max_attempts, max_stalls = v_waiting.max_stalls,
                    backoff_min_us = v_waiting.backoff_min_us, backoff_max_us = v_waiting.backoff_max_us,
                    attempts = v_waiting.attempts, stalls = v_waiting.stalls, flags = v_waiting.flags
                WHERE id = v_waiting.id;
                PERFORM note(v_waiting.queue_id, v_was, v_waiting.state,
                             CASE WHEN v_was = 2 THEN 0::smallint ELSE p_stir END,
                             v_waiting.rank, v_waiting.run_at, NULL);
                job_id := v_waiting.id;
                job_seq := v_waiting.seq;
                existed := true;
                RETURN;
            END IF;
            -- Held until this transaction ends: who settles the running job must find the one that is blocked by it.
            -- Heartbeats do not mind this kind of lock.
            PERFORM FROM jobs WHERE queue_id = p_job.queue_id AND key = p_job.key AND state = 3 FOR KEY SHARE;
            IF FOUND THEN
                p_job.state := 2;
                p_job.flags := v_flags;
            ELSE
                p_job.state := state_by_run_at(p_job.run_at, p_now);
            END IF;
        ELSE
            p_job.state := state_by_run_at(p_job.run_at, p_now);
        END IF;
        BEGIN
            INSERT INTO jobs (seq, id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload, codec, headers,
                              timeout_us, max_stalls, backoff_min_us, backoff_max_us, flags, key, idempotency_key)
            VALUES (coalesce(p_job.seq, nextval('job_seq')), p_job.id, p_job.queue_id, p_job.type, p_job.run_at, p_job.created_at, p_job.rank, p_job.max_attempts,
                    p_job.state, p_job.payload, p_job.codec, p_job.headers, p_job.timeout_us, p_job.max_stalls,
                    p_job.backoff_min_us, p_job.backoff_max_us, p_job.flags, p_job.key, p_job.idempotency_key)
            ON CONFLICT (id) DO NOTHING RETURNING seq INTO v_seq;
        EXCEPTION WHEN unique_violation THEN
            -- The running job of this key has just gone back to waiting: look again.
            CONTINUE;
        END;
        job_id := p_job.id;
        job_seq := v_seq;
        existed := v_seq IS NULL;
        IF existed THEN
            RETURN;
        END IF;
        IF p_job.key IS NOT NULL AND p_job.state <> 2 THEN
            -- Between the two looks the running job may have gone back to waiting, and been claimed again before this one was
            -- stored. From now on it cannot: this one has the place of the key among those that wait.
            PERFORM FROM jobs WHERE queue_id = p_job.queue_id AND key = p_job.key AND state = 3 FOR KEY SHARE;
            IF FOUND THEN
                DELETE FROM jobs WHERE id = p_job.id;
                CONTINUE;
            END IF;
        END IF;
        IF EXISTS (SELECT FROM finished WHERE id = p_job.id) OR EXISTS (SELECT FROM dead WHERE id = p_job.id) THEN
            -- It was there, ran and ended while this one looked elsewhere.
            DELETE FROM jobs WHERE id = p_job.id;
            existed := true;
            RETURN;
        END IF;
        PERFORM note(p_job.queue_id, NULL, p_job.state, CASE WHEN p_job.state = 2 THEN 0::smallint ELSE p_stir END,
                     p_job.rank, p_job.run_at, NULL);
        RETURN;
    END LOOP;
END $$;

-- Jobs of any kind, in order. p_jobs: objects with the columns of `jobs` that are given, and `queue`. p_again: an earlier try
-- may have stored them, or may do so later: from now on it may not.
CREATE FUNCTION enqueue_by_rules(
    p_jobs json, p_payloads bytea, p_ends integer[], p_now bigint, p_stir smallint, p_again boolean
) RETURNS TABLE (job_id text, existed boolean) LANGUAGE plpgsql AS $$
DECLARE
    v_given record;
    v_job jobs;
    v_answer record;
    v_known text;
    v_unused integer[] := '{}';
    v_queues jsonb := '{}';
    v_seqs bigint[] := ARRAY(SELECT nextval('job_seq') FROM json_array_elements(p_jobs));
BEGIN
    FOR v_given IN SELECT DISTINCT g ->> 'queue' AS name FROM json_array_elements(p_jobs) AS g ORDER BY 1 LOOP
        IF NOT EXISTS (SELECT FROM queues WHERE name = v_given.name) THEN
            v_unused := v_unused || queue_id_of(v_given.name);
        END IF;
        v_queues := v_queues || jsonb_build_object(v_given.name, queue_id_of(v_given.name));
    END LOOP;
    -- In one order for everybody, so that two batches do not wait for each other.
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock((v_queues ->> (g ->> 'queue'))::integer, 'key', g ->> 'key') AS number
        FROM json_array_elements(p_jobs) AS g WHERE g ->> 'key' IS NOT NULL ORDER BY 1
    ) AS l;
    -- The running jobs of these keys, which the new ones may be blocked by, in the order in which settling locks them.
    PERFORM FROM jobs AS j
    WHERE j.key IS NOT NULL AND j.state = 3 AND (j.queue_id, j.key) IN (
        SELECT (v_queues ->> (g ->> 'queue'))::integer, g ->> 'key' FROM json_array_elements(p_jobs) AS g)
    ORDER BY j.seq FOR KEY SHARE OF j;
    -- Each idempotency key gets a row for the first job that has it, in one order for everybody: by the key first, since a sort by
    -- a number that is the same for most compares all texts in full. Where another transaction has put one there and not ended,
    -- this waits for it.
    INSERT INTO idempotency (queue_id, idempotency_key, job_seq, job_id)
    SELECT DISTINCT ON (2, 1) (v_queues ->> (g.value ->> 'queue'))::integer, (g.value ->> 'idempotency_key') COLLATE "C",
           v_seqs[g.ordinality], g.value ->> 'id'
    FROM json_array_elements(p_jobs) WITH ORDINALITY AS g
    WHERE g.value ->> 'idempotency_key' IS NOT NULL ORDER BY 2, 1, g.ordinality
    ON CONFLICT DO NOTHING;
    FOR v_given IN
        SELECT g.value, g.ordinality AS n FROM json_array_elements(p_jobs) WITH ORDINALITY AS g ORDER BY g.ordinality
    LOOP
        v_job := json_populate_record(NULL::jobs, v_given.value);
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
                -- It leads to a job that is gone. Of several who find that, the first leads it to its own.
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
            IF NOT existed THEN
                v_unused := array_remove(v_unused, v_job.queue_id);
            END IF;
            IF v_job.idempotency_key IS NOT NULL AND v_answer.job_seq IS NOT NULL THEN
                INSERT INTO idempotency AS i (queue_id, idempotency_key, job_seq, job_id, is_led)
                VALUES (v_job.queue_id, v_job.idempotency_key, v_answer.job_seq, v_answer.job_id, existed)
                ON CONFLICT (queue_id, idempotency_key)
                DO UPDATE SET job_seq = excluded.job_seq, job_id = excluded.job_id, is_led = excluded.is_led
                WHERE i.job_seq <> excluded.job_seq;
            END IF;
        END IF;
        IF v_job.idempotency_key IS NOT NULL AND existed THEN
            -- What was put there for this job, which was not stored.
            DELETE FROM idempotency
            WHERE queue_id = v_job.queue_id AND idempotency_key = v_job.idempotency_key AND job_seq = v_job.seq;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF p_again THEN
        PERFORM note_repetition();
        INSERT INTO repeated (call, try) SELECT g ->> 'id', 1 FROM json_array_elements(p_jobs) AS g
        ON CONFLICT (call) DO NOTHING;
    END IF;
    -- A queue that was only named, and made here: every job for it was known before, elsewhere.
    DELETE FROM queues WHERE id = ANY (v_unused) AND xmin = pg_current_xact_id()::xid;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan;
