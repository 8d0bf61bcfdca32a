-- Notify waiters of a stirring move. Not a trigger, because every statement that writes moves would pay for it.
CREATE OR REPLACE FUNCTION tell_waiters(p_queue_id integer, p_stir integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF p_stir = 2 THEN
        PERFORM pg_notify('taskharbor:' || current_schema(), (SELECT name FROM queues WHERE id = p_queue_id));
    END IF;
END $$;
