-- The advisory lock of a key. A caller that may add a job with the key takes it, so that two callers do not both find none. A
-- caller that asks for its number holds the lock of all keys shared; a caller that holds that lock alone (see `lock_all_keys`)
-- needs no other.
CREATE OR REPLACE FUNCTION key_lock(p_queue_id integer, p_key text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('taskharbor.holds_all_keys', true) = 'on' THEN
        RETURN queue_lock(-4);
    END IF;
    PERFORM pg_advisory_xact_lock_shared(queue_lock(-4));
    RETURN hashtextextended('key' || p_key, 'queues'::regclass::oid::bigint * 31 + p_queue_id);
END $$;
