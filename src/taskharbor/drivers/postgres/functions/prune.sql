-- Retention row by row, for what belongs to no day, and for the dead. How many rows went.
CREATE OR REPLACE FUNCTION prune(p_now bigint, p_limit integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_queue queues;
    v_jobs integer := 0;
    v_rows integer := 0;
    v_here integer;
    v_has_jobs boolean := EXISTS (SELECT FROM finished_rest);
    v_has_rows boolean := EXISTS (SELECT FROM attempts_rest);
BEGIN
    FOR v_queue IN SELECT * FROM queues ORDER BY id LOOP
        IF v_has_jobs THEN
            v_jobs := v_jobs + remove_ended('finished_rest', v_queue.id, 4::smallint, p_now - v_queue.keep_done_us + 1,
                                            p_limit - v_jobs);
            v_jobs := v_jobs + remove_ended('finished_rest', v_queue.id, 6::smallint, p_now - v_queue.keep_done_us + 1,
                                            p_limit - v_jobs);
        END IF;
        v_jobs := v_jobs + remove_ended('dead', v_queue.id, 5::smallint, p_now - v_queue.keep_dead_us + 1, p_limit - v_jobs);
        IF v_has_rows AND v_queue.keep_attempts_us IS NOT NULL AND v_rows < p_limit THEN
            WITH gone AS (
                DELETE FROM attempts_rest WHERE ctid = ANY (ARRAY(
                    SELECT a.ctid FROM attempts_rest AS a
                    WHERE a.queue_id = v_queue.id AND a.ended_at <= p_now - v_queue.keep_attempts_us
                    LIMIT p_limit - v_rows FOR UPDATE SKIP LOCKED)) RETURNING xid, seq
            ), last AS (
                SELECT xid, seq FROM gone WHERE seq > (SELECT max(last_seq) FROM epochs) ORDER BY xid DESC, seq DESC LIMIT 1
            )
            SELECT (SELECT count(*) FROM gone), (SELECT note_trimmed(xid, seq) FROM last) INTO v_here;
            v_rows := v_rows + v_here;
        END IF;
    END LOOP;
    RETURN v_jobs + v_rows;
END $$ SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;
REVOKE EXECUTE ON FUNCTION prune(bigint, integer) FROM PUBLIC;
