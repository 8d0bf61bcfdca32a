-- Whether something may have become runnable in one of the queues since the snapshot in which each was last looked at, and
-- when the next waiting job or lease comes due after the time of that look. A function, because only a function can say that
-- the plan is made once: making it costs ten times as much as the look.
CREATE FUNCTION watch(p_names text[], p_seen pg_snapshot[], p_since bigint[])
RETURNS TABLE (snapshot text, is_stirred boolean, due bigint) LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY
    SELECT pg_current_snapshot()::text,
        coalesce(bool_or(
            CASE WHEN g.seen IS NULL THEN t.queue_id IS NOT NULL OR EXISTS (
                    SELECT FROM moves AS m WHERE m.queue_id = q.id AND m.stir > 0)
                 WHEN t.folded > pg_snapshot_xmin(g.seen) THEN true
                 ELSE EXISTS (
                    SELECT FROM moves AS m WHERE m.queue_id = q.id AND m.stir > 0
                      AND m.xid >= pg_snapshot_xmin(g.seen) AND NOT pg_visible_in_snapshot(m.xid, g.seen))
            END), false),
        min(least(
            (SELECT min(first.run_at) FROM unnest(waiting_ranks(q.id)) AS r(rank),
                 LATERAL (SELECT j.run_at FROM jobs AS j
                          WHERE j.queue_id = q.id AND j.rank = r.rank AND j.state <= 1 AND j.run_at > g.since
                          ORDER BY j.run_at, j.seq LIMIT 1) AS first),
            (SELECT j.expires_at FROM jobs AS j
             WHERE j.queue_id = q.id AND j.state = 3 AND coalesce(j.expires_at, j.run_at) > g.since
             ORDER BY coalesce(j.expires_at, j.run_at) LIMIT 1)))
    FROM unnest(p_names, p_seen, p_since) AS g(name, seen, since)
        JOIN queues AS q ON q.name = g.name
        LEFT JOIN totals AS t ON t.queue_id = q.id;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan;
