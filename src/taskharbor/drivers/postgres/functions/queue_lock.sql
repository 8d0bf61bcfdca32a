-- The advisory lock of a queue. Claims hold it shared; changes of the settings hold it alone. Claims under a limit also hold the
-- lock of -1000 - p_queue_id alone.
CREATE OR REPLACE FUNCTION queue_lock(p_queue_id integer) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN ('queues'::regclass::oid::bigint << 32) + p_queue_id;
