-- Tell if something may have become runnable in one of the queues since the last look at each, and when the next waiting job or
-- lease comes due after p_since. The last look is the snapshot that the last call returned (p_seen); or, if a claim has left no
-- job in a queue, the hint of that claim (p_hints, NULL if there is none). A function, because only a function can fix that the
-- plan is made once: planning costs ten times as much as the look.
CREATE OR REPLACE FUNCTION watch(p_names text[], p_hints claim_hint[], p_seen pg_snapshot, p_since bigint)
RETURNS TABLE (snapshot text, is_stirred boolean, due bigint) LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY
    SELECT pg_current_snapshot()::text,
        coalesce(bool_or(EXISTS (
            SELECT FROM moves AS m
            WHERE m.queue_id = q.id AND m.xid >= g.low AND (g.seen IS NULL OR NOT pg_visible_in_snapshot(m.xid, g.seen))
              AND (m.stir > 0 OR m.folded > g.low))), false),
        min(least(
            (SELECT min(first.run_at) FROM unnest(waiting_ranks(q.id)) AS r(rank),
                 LATERAL (SELECT j.run_at FROM jobs AS j
                          WHERE j.queue_id = q.id AND j.rank = r.rank AND j.state <= 1 AND j.run_at > p_since
                          ORDER BY j.run_at, j.seq LIMIT 1) AS first),
            (SELECT j.expires_at FROM jobs AS j
             WHERE j.queue_id = q.id AND j.state = 3 AND coalesce(j.expires_at, j.run_at) > p_since
             ORDER BY coalesce(j.expires_at, j.run_at) LIMIT 1)))
    FROM (SELECT p_names[n] AS name, coalesce((p_hints[n]).seen, p_seen) AS seen FROM generate_subscripts(p_names, 1) AS n) AS s,
        LATERAL (SELECT s.name, s.seen, coalesce(pg_snapshot_xmin(s.seen), '0'::xid8) AS low) AS g
        JOIN queues AS q ON q.name = g.name;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan;
