-- Fold moves, at most every p_every seconds. If another call is folding, do nothing.
CREATE OR REPLACE FUNCTION fold(p_every double precision) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_upkeep upkeep;
BEGIN
    SELECT * INTO v_upkeep FROM upkeep FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR v_upkeep.folded_at > clock_timestamp() - make_interval(secs => p_every) THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM moves AS m
        USING (SELECT DISTINCT queue_id FROM moves WHERE xid < v_upkeep.horizon AND folded IS NULL) AS changed
        WHERE m.queue_id = changed.queue_id AND (m.xid < v_upkeep.horizon OR m.folded IS NOT NULL)
        RETURNING m.*
    )
    INSERT INTO moves (queue_id, folded, high_run_at, latest_end, scheduled, ready, blocked, inflight, done, dead,
                       cancelled, done_total, dead_total, cancelled_total)
    SELECT queue_id, v_upkeep.horizon, max(high_run_at), max(latest_end), sum(scheduled), sum(ready), sum(blocked),
           sum(inflight), sum(done), sum(dead), sum(cancelled), sum(done_total), sum(dead_total), sum(cancelled_total)
    FROM gone GROUP BY queue_id;
    -- A try that the server has not read after an hour will never be read.
    DELETE FROM repeated WHERE made_at < clock_timestamp() - interval '1 hour';
    UPDATE upkeep SET folded_at = clock_timestamp(), horizon = pg_snapshot_xmin(pg_current_snapshot());
END $$ SET search_path FROM CURRENT;
