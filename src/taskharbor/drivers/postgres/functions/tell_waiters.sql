-- For whoever writes a move that stirs. Not a trigger, which every statement that writes moves would pay for.
CREATE OR REPLACE FUNCTION tell_waiters(p_queue_id integer, p_stir integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_stir = 2 THEN
        PERFORM pg_notify('taskharbor:' || current_schema(), (SELECT name FROM queues WHERE id = p_queue_id));
    END IF;
END $$;
