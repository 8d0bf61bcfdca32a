-- Heartbeats. First a row with code 0 for every extended lease. If all were extended, that is all. Else another row for every
-- item of the batch: 1 not found, 2 not inflight, 3 mismatch, 4 expired, 5 fine, but extended above or locked by another call at
-- this moment. A heartbeat never waits for a lock while it holds others: the caller asks again for a locked one.
CREATE OR REPLACE FUNCTION extend_lease(
    p_seqs bigint[], p_ids text[], p_secrets text[], p_progress jsonb, p_lease_for bigint, p_now bigint
) RETURNS TABLE (n integer, code integer, expires_at bigint, cancel_requested boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_extended integer;
BEGIN
    RETURN QUERY
    WITH held AS MATERIALIZED (
        SELECT g.n::integer AS n, j.ctid AS place
        FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n) JOIN jobs AS j ON j.id = g.id
        -- "+ 0" keeps the planner from walking all leases for each item of the batch.
        WHERE j.seq = g.seq AND j.token = g.secret AND j.state + 0 = 3 AND j.expires_at + 0 > p_now
        FOR NO KEY UPDATE OF j SKIP LOCKED
    )
    UPDATE jobs AS j SET
        -- A heartbeat that arrives late, with an old `now`, does not shorten the lease.
        expires_at = greatest(j.expires_at, p_now + p_lease_for),
        progress = coalesce(decode(p_progress ->> held.n::text, 'base64'), j.progress)
    FROM held WHERE j.ctid = held.place
    RETURNING held.n, 0, j.expires_at, j.cancel_requested;
    GET DIAGNOSTICS v_extended = ROW_COUNT;
    IF v_extended < cardinality(p_ids) THEN
        RETURN QUERY
        SELECT g.n::integer,
               CASE WHEN j.id IS NULL THEN CASE WHEN is_kept(g.id) THEN 2 ELSE 1 END
                    WHEN j.state <> 3 THEN 2
                    WHEN j.token <> g.secret OR j.seq <> g.seq THEN 3
                    WHEN j.expires_at <= p_now THEN 4
                    ELSE 5 END,
               j.expires_at, j.cancel_requested
        FROM unnest(p_seqs, p_ids, p_secrets) WITH ORDINALITY AS g(seq, id, secret, n) LEFT JOIN jobs AS j ON j.id = g.id;
    END IF;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
   SET plan_cache_mode = force_generic_plan;
