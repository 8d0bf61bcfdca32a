-- What an operator names by id: only what has ended goes. Also says of those that have not what they are.
CREATE OR REPLACE FUNCTION remove_jobs(p_ids text[]) RETURNS TABLE (id text, state smallint) LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM ended WHERE id = ANY (p_ids) RETURNING id, seq, queue_id, state, idempotency_key
    ), forgotten AS (
        DELETE FROM idempotency AS i USING gone AS g
        WHERE i.queue_id = g.queue_id AND i.idempotency_key = g.idempotency_key AND i.job_seq = g.seq
    ), forgotten_led AS (
        DELETE FROM idempotency WHERE is_led AND job_seq IN (SELECT seq FROM gone)
    ), counted AS (
        INSERT INTO moves (queue_id, done, dead, cancelled)
        SELECT queue_id, -count(*) FILTER (WHERE state = 4), -count(*) FILTER (WHERE state = 5), -count(*) FILTER (WHERE state = 6)
        FROM gone GROUP BY queue_id
    )
    SELECT id, state FROM gone UNION ALL SELECT id, state FROM jobs WHERE id = ANY (p_ids)
$$ SET search_path FROM CURRENT;
