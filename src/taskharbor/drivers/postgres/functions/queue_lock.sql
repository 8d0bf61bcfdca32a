-- The advisory lock of a queue: claims hold it shared, claims under a limit and changes of the settings alone.
CREATE OR REPLACE FUNCTION queue_lock(p_queue_id integer) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN ('queues'::regclass::oid::bigint << 32) + p_queue_id;
