-- Return true if a task may stage for a write: not after it was published or abandoned. Then the task is late, or a batch of a
-- stream is repeated. Volatile, so that it looks after it has the lock and not before.
CREATE OR REPLACE FUNCTION may_stage(p_write text, p_series text, p_number bigint) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(write_lock(p_write));
    RETURN NOT EXISTS (SELECT FROM published WHERE series = p_series AND number >= p_number);
END $$ SET search_path FROM CURRENT;
