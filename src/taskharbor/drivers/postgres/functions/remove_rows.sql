-- Remove rows of a part of the history. For jobs, also their idempotency keys and counts; for the log, the last removed row is
-- noted. Returns the number of rows. p_where: a condition on a row `j` and its queue `q`; NULL: the table is about to be dropped,
-- so its rows stay in it.
CREATE OR REPLACE FUNCTION remove_rows(p_table regclass, p_where text, p_limit bigint DEFAULT NULL) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_is_log boolean := p_table::text LIKE 'attempts%';
    v_columns text := CASE WHEN v_is_log THEN 'j.xid, j.seq' ELSE 'j.queue_id, j.seq, j.state, j.idempotency_key' END;
    v_gone text := format('SELECT %s FROM %s AS j', v_columns, p_table);
    v_rows bigint;
BEGIN
    IF p_where IS NOT NULL THEN
        v_gone := format(
            'WITH chosen AS MATERIALIZED (
                 SELECT j.tableoid AS part, j.ctid AS place, j.%1$s AS instant FROM %2$s AS j JOIN queues AS q ON q.id = j.queue_id
                 WHERE %3$s LIMIT %4$L FOR UPDATE OF j SKIP LOCKED
             ) DELETE FROM %2$s AS j USING chosen AS c
             WHERE j.ctid = c.place AND j.tableoid = c.part AND j.%1$s = c.instant RETURNING %5$s',
            CASE WHEN v_is_log THEN 'ended_at' ELSE 'finished_at' END, p_table, p_where, p_limit, v_columns);
    END IF;
    IF v_is_log THEN
        EXECUTE 'WITH gone AS NOT MATERIALIZED (' || v_gone || '), last AS (
                SELECT xid, seq FROM gone ORDER BY xid DESC, seq DESC LIMIT 1
            ), noted AS (
                UPDATE epochs SET trimmed_xid = last.xid, trimmed_seq = last.seq FROM last
                WHERE epoch = (SELECT max(epoch) FROM epochs) AND (trimmed_xid, trimmed_seq) < (last.xid, last.seq)
            ) SELECT count(*) FROM gone' INTO v_rows;
    ELSE
        EXECUTE 'WITH gone AS NOT MATERIALIZED (' || v_gone || '), own_keys AS (
                DELETE FROM idempotency AS i USING gone AS g
                WHERE i.queue_id = g.queue_id AND i.idempotency_key = g.idempotency_key AND i.job_seq = g.seq
            ), led_keys AS (
                DELETE FROM idempotency AS i USING gone AS g WHERE i.is_led AND i.job_seq = g.seq
            ), noted AS (
                INSERT INTO moves (queue_id, done, dead, cancelled)
                SELECT queue_id, -count(*) FILTER (WHERE state = 4), -count(*) FILTER (WHERE state = 5),
                       -count(*) FILTER (WHERE state = 6)
                FROM gone GROUP BY queue_id RETURNING done + dead + cancelled AS jobs
            ) SELECT -coalesce(sum(jobs), 0) FROM noted' INTO v_rows;
    END IF;
    RETURN v_rows;
END $$;
