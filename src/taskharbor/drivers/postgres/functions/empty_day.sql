-- Take a queue's rows out of a day, or all rows (p_queue_id NULL), with what belongs to them. How many there were.
CREATE OR REPLACE FUNCTION empty_day(p_parent text, p_name text, p_queue_id integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_rows bigint;
BEGIN
    IF p_parent = 'finished' THEN
        EXECUTE format('DELETE FROM idempotency AS i USING %I AS f
                        WHERE i.queue_id = f.queue_id AND i.idempotency_key = f.idempotency_key AND i.job_seq = f.seq
                          AND ($1 IS NULL OR f.queue_id = $1)', p_name) USING p_queue_id;
        EXECUTE format('DELETE FROM idempotency AS i USING %I AS f
                        WHERE i.is_led AND i.job_seq = f.seq AND ($1 IS NULL OR f.queue_id = $1)', p_name) USING p_queue_id;
        EXECUTE format(
            'WITH gone AS (INSERT INTO moves (queue_id, done, cancelled)
                 SELECT queue_id, -count(*) FILTER (WHERE state = 4), -count(*) FILTER (WHERE state = 6)
                 FROM %I WHERE $1 IS NULL OR queue_id = $1 GROUP BY queue_id RETURNING done + cancelled AS jobs)
             SELECT -coalesce(sum(jobs), 0) FROM gone', p_name) INTO v_rows USING p_queue_id;
    ELSE
        EXECUTE format('SELECT count(*) FROM %I WHERE $1 IS NULL OR queue_id = $1', p_name) INTO v_rows USING p_queue_id;
        EXECUTE format(
            'SELECT note_trimmed(xid, seq) FROM (
                 SELECT xid, seq FROM %I WHERE ($1 IS NULL OR queue_id = $1) AND seq > (SELECT max(last_seq) FROM epochs)
                 ORDER BY xid DESC, seq DESC LIMIT 1) AS last', p_name) USING p_queue_id;
    END IF;
    IF p_queue_id IS NOT NULL THEN
        EXECUTE format('DELETE FROM %I WHERE queue_id = $1', p_name) USING p_queue_id;
    END IF;
    RETURN v_rows;
END $$;
