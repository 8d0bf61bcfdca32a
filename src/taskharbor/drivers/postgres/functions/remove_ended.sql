-- Remove up to p_limit jobs that ended before an instant, with what belongs to them. How many went.
-- p_table: `dead`, `finished`, or one part of it.
CREATE OR REPLACE FUNCTION remove_ended(
    p_table regclass, p_queue_id integer, p_state smallint, p_before bigint, p_limit integer,
    p_types text[] DEFAULT NULL, p_key text DEFAULT NULL
) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_seqs bigint[];
    v_keys text[];
BEGIN
    IF p_limit < 1 OR p_before IS NULL THEN
        RETURN 0;
    END IF;
    EXECUTE format(
        'WITH chosen AS MATERIALIZED (
             SELECT j.seq, j.finished_at, j.tableoid AS part, j.ctid AS place FROM %1$s AS j
             WHERE j.queue_id = $1 AND j.state = $2 AND j.finished_at < $3
               AND ($4 IS NULL OR j.type = ANY ($4)) AND ($5 IS NULL OR j.key = $5)
             LIMIT $6 FOR UPDATE SKIP LOCKED
         ), gone AS (
             DELETE FROM %1$s AS j USING chosen AS c
             WHERE j.ctid = c.place AND j.tableoid = c.part AND j.seq = c.seq AND j.finished_at = c.finished_at
             RETURNING j.seq, j.idempotency_key
         ) SELECT array_agg(seq), array_agg(idempotency_key) FROM gone', p_table)
    INTO v_seqs, v_keys USING p_queue_id, p_state, p_before, p_types, p_key, p_limit;
    IF v_seqs IS NULL THEN
        RETURN 0;
    END IF;
    DELETE FROM idempotency AS i USING unnest(v_seqs, v_keys) AS g(seq, key)
    WHERE i.queue_id = p_queue_id AND i.idempotency_key = g.key AND i.job_seq = g.seq;
    DELETE FROM idempotency WHERE is_led AND job_seq = ANY (v_seqs);
    INSERT INTO moves (queue_id, done, dead, cancelled)
    SELECT p_queue_id, -(p_state = 4)::int * c, -(p_state = 5)::int * c, -(p_state = 6)::int * c
    FROM cardinality(v_seqs) AS c;
    RETURN cardinality(v_seqs);
END $$;
