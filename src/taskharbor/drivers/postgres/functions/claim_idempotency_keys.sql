-- Give numbers to the jobs of a write that have idempotency keys, and put a row into `idempotency` for the first job of each key.
-- Returns per job whether it has a row: jobs without one are not stored.
CREATE OR REPLACE FUNCTION claim_idempotency_keys(p_write text, p_tasks text[]) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_given bigint := 0;
    v_claimed bigint;
    v_found record;
    v_known text;
BEGIN
    FOR v_found IN
        SELECT s.ctid, s.jobs FROM staged AS s WHERE s.write = p_write AND (s.batch).idempotency_keys IS NOT NULL
        ORDER BY array_position(p_tasks, s.task), s.number
    LOOP
        UPDATE staged SET seqs = ARRAY(SELECT nextval('job_seq') FROM generate_series(1, v_found.jobs)) WHERE ctid = v_found.ctid;
        v_given := v_given + v_found.jobs;
    END LOOP;
    -- As in `enqueue_by_rules`, in the same order for all callers. No lock is held: a caller with the same key meets the row.
    -- Looking for each key before its row is stored costs two thirds more, so that is done only if a key is known.
    BEGIN
        INSERT INTO idempotency (queue_id, idempotency_key, job_seq, job_id)
        SELECT k.queue_id, k.key, k.seq, k.id FROM staged_keys AS k WHERE k.write = p_write ORDER BY k.key, k.queue_id;
    EXCEPTION WHEN unique_violation THEN
        INSERT INTO idempotency (queue_id, idempotency_key, job_seq, job_id)
        SELECT k.queue_id, k.key, k.seq, k.id FROM staged_keys AS k WHERE k.write = p_write ORDER BY k.key, k.queue_id
        ON CONFLICT DO NOTHING;
    END;
    GET DIAGNOSTICS v_claimed = ROW_COUNT;
    IF v_claimed = v_given THEN
        RETURN true;
    END IF;
    -- Keys that lead to removed jobs lead to these from now on.
    FOR v_found IN
        SELECT k.* FROM staged_keys AS k JOIN idempotency AS i ON i.queue_id = k.queue_id AND i.idempotency_key = k.key
        WHERE k.write = p_write AND i.job_seq <> k.seq AND NOT is_kept(i.job_id) ORDER BY k.key, k.queue_id
    LOOP
        SELECT i.job_id INTO v_known FROM idempotency AS i
        WHERE i.queue_id = v_found.queue_id AND i.idempotency_key = v_found.key FOR UPDATE;
        IF NOT is_kept(v_known) THEN
            UPDATE idempotency SET job_seq = v_found.seq, job_id = v_found.id, is_led = false
            WHERE queue_id = v_found.queue_id AND idempotency_key = v_found.key;
        END IF;
    END LOOP;
    RETURN false;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET work_mem = '64MB';
