-- Store a batch of jobs by one INSERT. Returns their number. Runs with the settings of its callers. p_seqs: numbers of jobs with
-- idempotency keys; only jobs to which the key leads are stored; p_are_new: all of them are. Jobs without ids get them here:
-- p_id_head and eight hexadecimal digits, from p_first on.
CREATE OR REPLACE FUNCTION store_batch(
    p_batch job_batch, p_now bigint, p_stir integer, p_seqs bigint[] DEFAULT NULL, p_are_new boolean DEFAULT true,
    p_id_head text DEFAULT NULL, p_first bigint DEFAULT 0
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := queue_id_of(p_batch.queue);
    v_jobs bigint;
BEGIN
    WITH added AS (
        INSERT INTO jobs (seq, id, queue_id, type, run_at, created_at, rank, max_attempts, state, headers, payload,
                          codec, timeout_us, max_stalls, backoff_min_us, backoff_max_us, flags, idempotency_key)
        SELECT coalesce(g.seq, nextval('job_seq')), coalesce(g.id, p_id_head || lpad(to_hex(p_first + g.n), 8, '0')), v_queue,
               coalesce(g.type, p_batch.types[1]), coalesce(g.run_at, p_batch.run_ats[1]),
               coalesce(g.created_at, p_batch.created_ats[1]), coalesce(g.rank, p_batch.ranks[1]), p_batch.max_attempts,
               CASE WHEN coalesce(g.run_at, p_batch.run_ats[1]) > p_now THEN 0 ELSE 1 END,
               nullif(coalesce(g.headers, p_batch.headers[1]), ''),
               substring(p_batch.payloads FROM g.starts + 1 FOR g.ends - g.starts), p_batch.codec, p_batch.timeout_us,
               p_batch.max_stalls, p_batch.backoff_min_us, p_batch.backoff_max_us, p_batch.flags, g.idempotency_key
        FROM unnest(p_batch.ids, p_batch.types, p_batch.run_ats, p_batch.created_ats, p_batch.ranks, p_batch.headers,
                    p_batch.idempotency_keys, p_seqs, p_batch.ends[:cardinality(p_batch.ends) - 1], p_batch.ends[2:])
             WITH ORDINALITY AS g(id, type, run_at, created_at, rank, headers, idempotency_key, seq, starts, ends, n)
        WHERE p_are_new OR g.seq IS NULL OR EXISTS (
            SELECT FROM idempotency AS i
            WHERE i.queue_id = v_queue AND i.idempotency_key = g.idempotency_key AND i.job_seq = g.seq)
        RETURNING rank, run_at, state
    ), noted AS (
        INSERT INTO moves (queue_id, scheduled, ready, stir, ranks, low_run_at, high_run_at)
        SELECT v_queue, count(*) FILTER (WHERE state = 0), count(*) FILTER (WHERE state = 1), p_stir,
               array_agg(DISTINCT rank), min(run_at), max(run_at) FILTER (WHERE state = 1)
        FROM added
    )
    SELECT count(*) INTO v_jobs FROM added;
    PERFORM tell_waiters(v_queue, p_stir);
    RETURN v_jobs;
END $$;
