-- Return the number of a queue. A new queue is added.
CREATE OR REPLACE FUNCTION queue_id_of(p_name text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_id integer;
BEGIN
    LOOP
        SELECT id INTO v_id FROM queues WHERE name = p_name;
        EXIT WHEN FOUND;
        INSERT INTO queues (name, keep_done_us, keep_dead_us, keep_attempts_us)
        VALUES (p_name, 7 * 86400000000, 90 * 86400000000, 30 * 86400000000)
        ON CONFLICT (name) DO NOTHING;
    END LOOP;
    RETURN v_id;
END $$;
