-- Counters and wake-ups: what every transition has in common.

-- The advisory lock of a queue: claims hold it shared, claims under a limit and changes of the settings alone.
CREATE FUNCTION queue_lock(p_queue_id integer) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN ('queues'::regclass::oid::bigint << 32) + p_queue_id;

-- Taken by whoever may add a job with this key (or idempotency key), so that two of them do not both find none.
CREATE FUNCTION key_lock(p_queue_id integer, p_kind text, p_key text) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN hashtextextended(p_kind || p_key, 'queues'::regclass::oid::bigint * 31 + p_queue_id);

-- For whoever writes a move that stirs. Not a trigger, which every statement that writes moves would pay for.
CREATE FUNCTION tell_waiters(p_queue_id integer, p_stir smallint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_stir = 2 THEN
        PERFORM pg_notify('taskharbor:' || current_schema(), (SELECT name FROM queues WHERE id = p_queue_id));
    END IF;
END $$;

-- One job moved from a state to another; NULL is outside. The batch forms write their own sums.
CREATE FUNCTION note(
    p_queue_id integer, p_from smallint, p_to smallint, p_stir smallint,
    p_rank smallint, p_run_at bigint, p_latest_end bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_from smallint := coalesce(p_from, -1);
    v_to smallint := coalesce(p_to, -1);
    v_waits boolean := v_to IN (0, 1);
BEGIN
    INSERT INTO moves (queue_id, scheduled, ready, blocked, inflight, done, dead, cancelled,
                       done_total, dead_total, cancelled_total,
                       stir, ranks, low_run_at, high_run_at, latest_end)
    VALUES (p_queue_id,
            (v_to = 0)::int - (v_from = 0)::int, (v_to = 1)::int - (v_from = 1)::int,
            (v_to = 2)::int - (v_from = 2)::int, (v_to = 3)::int - (v_from = 3)::int,
            (v_to = 4)::int - (v_from = 4)::int, (v_to = 5)::int - (v_from = 5)::int,
            (v_to = 6)::int - (v_from = 6)::int,
            (v_to = 4)::int, (v_to = 5)::int, (v_to = 6)::int,
            p_stir,
            CASE WHEN v_waits THEN ARRAY[p_rank] END,
            CASE WHEN v_waits THEN p_run_at END,
            CASE WHEN v_to = 1 THEN p_run_at END,
            p_latest_end);
    PERFORM tell_waiters(p_queue_id, p_stir);
END $$;
