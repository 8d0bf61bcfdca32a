-- Ending and extending leases. A lease is known by the job's number (which the token carries), its id and the secret.

-- One settlement of any kind, by the contract's rules. 0 done; 1 not found, 2 not inflight, 3 mismatch, 4 expired.
-- p_kind: 0 ack, 1 retry, 2 fail, 3 release, 4 discard.
CREATE FUNCTION settle_one(
    p_id text, p_seq bigint, p_secret text, p_kind smallint, p_now bigint, p_stir smallint, p_run_at bigint, p_attempts integer,
    p_error_type text, p_error_message text, p_error text, p_result bytea, p_again boolean
) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
    v_held jobs;
    v_job jobs;
    v_state smallint;
BEGIN
    -- FOR UPDATE, although less would do for the change: it waits for who is adding a job that this one blocks.
    SELECT * INTO v_held FROM jobs WHERE id = p_id AND state + 0 = 3 AND token = p_secret AND seq = p_seq FOR UPDATE;
    IF NOT FOUND THEN
        -- A token that is gone does not come back: no need to get into the way of who holds the job now.
        SELECT * INTO v_held FROM jobs WHERE id = p_id;
    END IF;
    IF p_again AND p_kind IN (1, 3) AND (v_held.token = p_secret) IS NOT TRUE AND EXISTS (
        -- The answer to the first try was lost, and this is what it wrote.
        SELECT FROM attempts WHERE job_id = p_id AND outcome IN (1, 4, 5)
        AND (ended_at = p_now OR ended_at > p_now AND ended_at = reserved_at)
    ) THEN
        RETURN 0;
    END IF;
    IF v_held.seq IS NULL THEN
        SELECT state INTO v_state FROM finished WHERE id = p_id;
        IF NOT FOUND THEN
            SELECT state INTO v_state FROM dead WHERE id = p_id;
            IF NOT FOUND THEN
                RETURN 1;
            END IF;
        END IF;
        -- Terminal idempotence: whoever repeats an end finds it reached.
        IF (p_kind = 0 AND v_state = 4) OR (p_kind = 2 AND v_state IN (4, 5)) OR (p_kind = 4 AND v_state = 6) THEN
            RETURN 0;
        END IF;
        RETURN 2;
    END IF;
    IF v_held.state <> 3 THEN
        RETURN 2;
    ELSIF v_held.token <> p_secret OR v_held.seq <> p_seq THEN
        RETURN 3;
    ELSIF v_held.expires_at <= p_now THEN
        RETURN 4;
    END IF;
    v_job := v_held;
    IF p_kind IN (1, 2) THEN
        v_job.attempts := p_attempts;
        v_job.last_error := p_error;
        v_job.failed_at := p_now;
    END IF;
    IF p_kind = 0 THEN
        PERFORM end_job(v_job, 4::smallint, 0::smallint, p_now, p_stir, p_result => p_result);
    ELSIF p_kind = 2 THEN
        PERFORM end_job(v_job, 5::smallint, 2::smallint, p_now, p_stir, p_error_type, p_error_message);
    ELSIF p_kind = 4 OR v_job.cancel_requested THEN
        v_job.last_error := coalesce(p_error, v_job.last_error);
        PERFORM end_job(v_job, 6::smallint, 5::smallint, p_now, p_stir, p_error_type, p_error_message);
    ELSE
        v_job.run_at := coalesce(p_run_at, v_job.run_at);
        PERFORM back_to_waiting(v_held, v_job, CASE p_kind WHEN 1 THEN 1 ELSE 4 END::smallint, p_now, p_stir,
                                p_error_type, p_error_message);
    END IF;
    RETURN 0;
END $$;

-- A batch. p_others: for what is not a plain ack without a result, {kind, run_at, attempts, type, message, error, result,
-- again: the job is in the batch more than once} by place in the batch; NULL where all are plain. An object that is looked up,
-- because joining a list would walk it anew for every row. Answers in order; NULL where every one succeeded.
CREATE FUNCTION settle(
    p_seqs bigint[], p_ids text[], p_secrets text[], p_others jsonb, p_now bigint, p_stir smallint, p_again boolean
) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_settled integer[];
    v_stirred integer[];
    v_one record;
    v_answers smallint[];
BEGIN
    -- Whoever locks several jobs takes those without a key first, then those with one, each by number: so no two calls wait
    -- for each other. What comes first here are plain acks of jobs without a key; so the others of that kind are locked along.
    IF EXISTS (SELECT FROM jsonb_each(p_others) AS o(n, e) WHERE o.e ->> 'kind' <> '0' OR o.e ->> 'again' IS NOT NULL) THEN
        PERFORM FROM jobs WHERE id = ANY (p_ids) AND key IS NULL ORDER BY seq FOR UPDATE;
    END IF;
    WITH given AS (
        SELECT g.seq, g.id, g.secret, g.n, decode(p_others -> g.n::text ->> 'result', 'base64') AS result
        FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n)
        WHERE coalesce(p_others -> g.n::text ->> 'kind', '0') = '0' AND p_others -> g.n::text ->> 'again' IS NULL
    ), gone AS (
        DELETE FROM jobs AS j USING given AS g
        -- "+ 0" keeps the planner from walking all leases for each of the batch: it must go by the id.
        WHERE j.id = g.id AND j.seq = g.seq AND j.token = g.secret AND j.state + 0 = 3 AND j.expires_at + 0 > p_now
          AND j.key IS NULL
        RETURNING j.*, g.n, g.result, greatest(p_now, j.reserved_at) AS ended_at
    ), kept AS (
        INSERT INTO finished (seq, run_at, created_at, finished_at, failed_at, timeout_us, backoff_min_us, backoff_max_us,
                              fence, queue_id, max_attempts, max_stalls, attempts, stalls, rank, state, flags, id, type,
                              codec, headers, idempotency_key, last_error, result, payload)
        SELECT seq, run_at, created_at, ended_at, failed_at, timeout_us, backoff_min_us, backoff_max_us,
               fence, queue_id, max_attempts, max_stalls, attempts, stalls, rank, 4, flags, id, type,
               codec, headers, idempotency_key, last_error, result, payload
        FROM gone
    ), logged AS (
        INSERT INTO attempts (job_id, queue_id, type, rank, fence, worker, created_at, run_at, reserved_at,
                              lease_expires_at, ended_at, outcome, state, payload_size)
        SELECT id, queue_id, type, rank, fence, worker, created_at, run_at, reserved_at,
               expires_at, ended_at, 0, 4, octet_length(payload)
        FROM gone ORDER BY n
    ), noted AS (
        INSERT INTO moves (queue_id, inflight, done, done_total, latest_end, stir)
        SELECT queue_id, -count(*), count(*), count(*), max(least(ended_at, expires_at)), stir_by_room(queue_id, p_stir)
        FROM gone GROUP BY queue_id
        RETURNING queue_id, stir
    )
    SELECT array_agg(n::integer), (SELECT array_agg(queue_id) FROM noted WHERE stir = 2)
    INTO v_settled, v_stirred FROM gone;
    IF v_stirred IS NOT NULL THEN
        PERFORM tell_waiters(stirred, 2::smallint) FROM unnest(v_stirred) AS stirred;
    END IF;
    IF cardinality(v_settled) = cardinality(p_ids) THEN
        RETURN NULL;
    END IF;
    v_answers := array_fill(0::smallint, ARRAY[cardinality(p_ids)]);
    -- Before their rows, and in the same order as `enqueue_by_rules`: so neither waits for what the other holds.
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock(j.queue_id, 'key', j.key) AS number
        FROM jobs AS j WHERE j.id = ANY (p_ids) AND j.key IS NOT NULL ORDER BY 1
    ) AS l;
    -- In order, so that the second settlement of a job finds what the first one did.
    FOR v_one IN
        SELECT g.seq, g.id, g.secret, g.n, p_others -> g.n::text AS e
        FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n)
        WHERE v_settled IS NULL OR g.n <> ALL (v_settled)
        ORDER BY g.n
    LOOP
        v_answers[v_one.n] := settle_one(
            v_one.id, v_one.seq, v_one.secret, coalesce((v_one.e ->> 'kind')::smallint, 0::smallint), p_now, p_stir,
            (v_one.e ->> 'run_at')::bigint, (v_one.e ->> 'attempts')::integer, v_one.e ->> 'type', v_one.e ->> 'message',
            v_one.e ->> 'error', decode(v_one.e ->> 'result', 'base64'), p_again);
    END LOOP;
    RETURN v_answers;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan;

-- Heartbeats. Only what moves is answered at once; the rest is looked at one by one to say what is wrong with it.
CREATE FUNCTION extend_lease(
    p_seqs bigint[], p_ids text[], p_secrets text[], p_progress jsonb, p_lease_for bigint, p_now bigint
) RETURNS TABLE (n integer, code smallint, expires_at bigint, cancel_requested boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_extended integer[] := '{}';
    v_one record;
    v_job jobs;
BEGIN
    -- A heartbeat never waits for a lock while it holds others: what somebody else is at is answered 5, to be asked again.
    FOR v_one IN
        WITH held AS MATERIALIZED (
            SELECT g.n, j.ctid AS place
            FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n) JOIN jobs AS j ON j.id = g.id
            -- "+ 0" keeps the planner from walking all leases for each of the batch.
            WHERE j.seq = g.seq AND j.token = g.secret AND j.state + 0 = 3 AND j.expires_at + 0 > p_now
            FOR NO KEY UPDATE OF j SKIP LOCKED
        )
        UPDATE jobs AS j SET
            -- A heartbeat that arrives late, with an old `now`, takes nothing away.
            expires_at = greatest(j.expires_at, p_now + p_lease_for),
            progress = coalesce(decode(p_progress ->> held.n::text, 'base64'), j.progress)
        FROM held WHERE j.ctid = held.place
        RETURNING held.n, j.expires_at, j.cancel_requested
    LOOP
        n := v_one.n;
        code := 0;
        expires_at := v_one.expires_at;
        cancel_requested := v_one.cancel_requested;
        v_extended := v_extended || n;
        RETURN NEXT;
    END LOOP;
    IF cardinality(v_extended) < cardinality(p_ids) THEN
        FOR v_one IN
            SELECT g.seq, g.id, g.secret, g.n FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n)
            WHERE g.n <> ALL (v_extended)
        LOOP
            n := v_one.n;
            expires_at := NULL;
            cancel_requested := false;
            SELECT * INTO v_job FROM jobs AS j WHERE j.id = v_one.id;
            IF NOT FOUND THEN
                code := CASE WHEN is_kept(v_one.id) THEN 2 ELSE 1 END;
            ELSIF v_job.state <> 3 THEN
                code := 2;
            ELSIF v_job.token <> v_one.secret OR v_job.seq <> v_one.seq THEN
                code := 3;
            ELSIF v_job.expires_at <= p_now THEN
                code := 4;
            ELSE
                -- The same job twice in one batch: both get the lease as it is now. Else it is busy.
                code := CASE WHEN v_one.id = ANY (ARRAY(SELECT p_ids[e] FROM unnest(v_extended) AS e)) THEN 0 ELSE 5 END;
                expires_at := v_job.expires_at;
                cancel_requested := v_job.cancel_requested;
            END IF;
            RETURN NEXT;
        END LOOP;
    END IF;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan;

CREATE FUNCTION reclaim(p_queue text, p_now bigint, p_limit integer, p_stir smallint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer;
    v_ended integer := 0;
BEGIN
    FOR v_queue IN SELECT id FROM queues WHERE p_queue IS NULL OR name = p_queue ORDER BY id LOOP
        EXIT WHEN v_ended >= p_limit;
        v_ended := v_ended + reclaim_queue(v_queue, -1, p_now, p_limit - v_ended, p_stir);
    END LOOP;
    RETURN v_ended;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan;
