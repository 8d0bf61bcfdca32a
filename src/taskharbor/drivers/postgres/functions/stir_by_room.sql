-- The notification when a lease ends: only a queue with a limit has new room.
CREATE OR REPLACE FUNCTION stir_by_room(p_queue_id integer, p_stir integer) RETURNS integer LANGUAGE sql STABLE
RETURN (SELECT CASE WHEN max_inflight IS NULL THEN 0 ELSE p_stir END FROM queues WHERE id = p_queue_id);
