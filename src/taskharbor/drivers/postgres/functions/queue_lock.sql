-- The advisory lock of a queue. Claims hold it shared; claims under a limit and changes of the settings hold it alone.
CREATE OR REPLACE FUNCTION queue_lock(p_queue_id integer) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN ('queues'::regclass::oid::bigint << 32) + p_queue_id;
