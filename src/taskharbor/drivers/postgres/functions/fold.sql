-- Fold moves into `totals`, at most every p_every seconds; who finds another at it goes away. How many were folded.
CREATE OR REPLACE FUNCTION fold(p_every double precision) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_upkeep upkeep;
    v_folded integer;
BEGIN
    SELECT * INTO v_upkeep FROM upkeep FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR v_upkeep.folded_at > clock_timestamp() - make_interval(secs => p_every) THEN
        RETURN 0;
    END IF;
    WITH gone AS (
        DELETE FROM moves WHERE xid < v_upkeep.horizon RETURNING *
    ), summed AS (
        SELECT queue_id, count(*) AS rows, max(high_run_at) AS high_run_at, max(latest_end) AS latest_end,
               sum(scheduled) AS scheduled, sum(ready) AS ready, sum(blocked) AS blocked, sum(inflight) AS inflight,
               sum(done) AS done, sum(dead) AS dead, sum(cancelled) AS cancelled,
               sum(done_total) AS done_total, sum(dead_total) AS dead_total, sum(cancelled_total) AS cancelled_total
        FROM gone GROUP BY queue_id
    ), added AS (
        INSERT INTO totals AS t (queue_id, folded, high_run_at, latest_end, scheduled, ready, blocked, inflight, done, dead,
                                 cancelled, done_total, dead_total, cancelled_total)
        SELECT queue_id, v_upkeep.horizon, high_run_at, latest_end, scheduled, ready, blocked, inflight, done, dead,
               cancelled, done_total, dead_total, cancelled_total
        FROM summed ORDER BY queue_id
        ON CONFLICT (queue_id) DO UPDATE SET
            folded = excluded.folded,
            high_run_at = greatest(t.high_run_at, excluded.high_run_at),
            latest_end = greatest(t.latest_end, excluded.latest_end),
            scheduled = t.scheduled + excluded.scheduled, ready = t.ready + excluded.ready,
            blocked = t.blocked + excluded.blocked, inflight = t.inflight + excluded.inflight,
            done = t.done + excluded.done, dead = t.dead + excluded.dead, cancelled = t.cancelled + excluded.cancelled,
            done_total = t.done_total + excluded.done_total, dead_total = t.dead_total + excluded.dead_total,
            cancelled_total = t.cancelled_total + excluded.cancelled_total
    )
    SELECT coalesce(sum(rows), 0) INTO v_folded FROM summed;
    -- A try that the server has not read after an hour will never be read.
    DELETE FROM repeated WHERE made_at < clock_timestamp() - interval '1 hour';
    UPDATE upkeep SET folded_at = clock_timestamp(), horizon = pg_snapshot_xmin(pg_current_snapshot());
    RETURN v_folded;
END $$ SET search_path FROM CURRENT;
