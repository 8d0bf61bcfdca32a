-- Write a row of `moves` for one job that came from a state (NULL: new) and is now as given. The batch functions write their own
-- sums. p_latest_end: the end of validity of a lease that ended here.
CREATE OR REPLACE FUNCTION note(p_from integer, p_job jobs, p_stir integer, p_latest_end bigint DEFAULT NULL)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_from integer := coalesce(p_from, -1);
    v_to integer := p_job.state;
BEGIN
    INSERT INTO moves (queue_id, scheduled, ready, blocked, inflight, done, dead, cancelled,
                       done_total, dead_total, cancelled_total, stir, ranks, low_run_at, high_run_at, latest_end)
    VALUES (p_job.queue_id,
            (v_to = 0)::int - (v_from = 0)::int, (v_to = 1)::int - (v_from = 1)::int,
            (v_to = 2)::int - (v_from = 2)::int, (v_to = 3)::int - (v_from = 3)::int,
            (v_to = 4)::int, (v_to = 5)::int - (v_from = 5)::int, (v_to = 6)::int,
            (v_to = 4)::int, (v_to = 5)::int, (v_to = 6)::int, p_stir,
            CASE WHEN v_to <= 1 THEN ARRAY[p_job.rank] END, CASE WHEN v_to <= 1 THEN p_job.run_at END,
            CASE WHEN v_to = 1 THEN p_job.run_at END, p_latest_end);
    PERFORM tell_waiters(p_job.queue_id, p_stir);
END $$;
