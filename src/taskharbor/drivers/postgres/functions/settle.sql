-- End leases. A lease is known by the job's number (part of the token), its id and the secret. p_others: settlements that are not
-- a plain ack, by place in the batch, as JSON of their structs; `in_order` if a job is in the batch more than once. NULL if all
-- are plain. It is an object, because joining a list would walk it again for every row. p_is_repeated: an earlier try of this
-- call may have taken effect. Answers in order; NULL if all succeeded.
CREATE OR REPLACE FUNCTION settle(
    p_seqs bigint[], p_ids text[], p_secrets text[], p_others jsonb, p_now bigint, p_stir integer, p_is_repeated boolean
) RETURNS smallint[] LANGUAGE plpgsql AS $$
DECLARE
    v_settled integer[];
    v_one record;
    v_answers smallint[];
BEGIN
    -- A caller that locks several jobs takes those without a key first, then those with one, each by number. So no two calls wait
    -- for each other. Plain acks of jobs without a key come first here; so other settlements of jobs without a key are locked
    -- with them.
    IF p_others ? 'in_order' OR EXISTS (SELECT FROM jsonb_each(p_others) AS o(n, e) WHERE o.e ->> 'type' <> 'ack') THEN
        PERFORM FROM jobs WHERE id = ANY (p_ids) AND key IS NULL ORDER BY seq FOR UPDATE;
    END IF;
    WITH given AS MATERIALIZED (
        SELECT g.seq, g.id, g.secret, g.n, decode(p_others -> g.n::text ->> 'result', 'base64') AS given_result
        FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n)
        WHERE p_others IS NULL
           OR NOT p_others ? 'in_order' AND coalesce(p_others -> g.n::text ->> 'type', 'ack') = 'ack'
        ORDER BY g.seq
    ), gone AS (
        DELETE FROM jobs AS j USING given AS g
        -- "+ 0" keeps the planner from walking all leases for each item of the batch: it must use the id.
        WHERE j.id = g.id AND j.seq = g.seq AND j.token = g.secret AND j.state + 0 = 3 AND j.expires_at + 0 > p_now
          AND j.key IS NULL
        RETURNING j.*, g.n, g.given_result, greatest(p_now, j.reserved_at) AS ended_at
    ), kept AS (
        INSERT INTO finished (seq, run_at, created_at, finished_at, failed_at, timeout_us, backoff_min_us, backoff_max_us,
                              fence, queue_id, max_attempts, max_stalls, attempts, stalls, rank, state, flags, id, type,
                              codec, headers, idempotency_key, last_error, result, payload)
        SELECT seq, run_at, created_at, ended_at, failed_at, timeout_us, backoff_min_us, backoff_max_us,
               fence, queue_id, max_attempts, max_stalls, attempts, stalls, rank, 4, flags, id, type,
               codec, headers, idempotency_key, last_error, given_result, payload
        FROM gone
    ), logged AS (
        INSERT INTO attempts (xid, job_id, queue_id, type, rank, fence, worker, created_at, run_at, reserved_at,
                              lease_expires_at, ended_at, outcome, state, payload_size)
        SELECT (SELECT log_xid(pg_current_xact_id())), id, queue_id, type, rank, fence, worker, created_at, run_at, reserved_at,
               expires_at, ended_at, 0, 4, octet_length(payload)
        FROM gone ORDER BY n
    ), noted AS (
        INSERT INTO moves (queue_id, inflight, done, done_total, latest_end, stir)
        SELECT queue_id, -count(*), count(*), count(*), max(least(ended_at, expires_at)), stir_by_room(queue_id, p_stir)
        FROM gone GROUP BY queue_id
        RETURNING tell_waiters(queue_id, stir)
    )
    SELECT array_agg(n::integer) INTO v_settled FROM gone;
    IF cardinality(v_settled) = cardinality(p_ids) THEN
        RETURN NULL;
    END IF;
    v_answers := array_fill(0::smallint, ARRAY[cardinality(p_ids)]);
    -- Before their rows, and in the same order as `enqueue_by_rules`, so that neither waits for a lock of the other.
    PERFORM pg_advisory_xact_lock(l.number) FROM (
        SELECT DISTINCT key_lock(j.queue_id, j.key) AS number
        FROM jobs AS j WHERE j.id = ANY (p_ids) AND j.key IS NOT NULL ORDER BY 1
    ) AS l;
    -- By number, but settlements of one job in the given order: the second finds the effect of the first.
    FOR v_one IN
        SELECT g.seq, g.id, g.secret, g.n, p_others -> g.n::text AS what
        FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n)
        WHERE v_settled IS NULL OR g.n <> ALL (v_settled)
        ORDER BY min(g.seq) OVER (PARTITION BY g.id), g.id, g.n
    LOOP
        v_answers[v_one.n] := settle_one(v_one.id, v_one.seq, v_one.secret, v_one.what, p_now, p_stir, p_is_repeated);
    END LOOP;
    RETURN v_answers;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
   SET plan_cache_mode = force_generic_plan;
