-- Find the first waiting jobs of several types, in claim order, from a place on: one rank of a queue. Each type has its own line.
-- A portion of every line is read, and more of a line as long as all that was read of it is among the first. `last_*`: the last
-- of them, if there may be more. Runs with the settings of `claim`.
CREATE OR REPLACE FUNCTION first_of_types(
    p_queue_id integer, p_rank smallint, p_run_at bigint, p_seq bigint, p_types text[], p_limit integer, p_now bigint,
    OUT places tid[], OUT types text[], OUT run_at bigint, OUT seq bigint, OUT last_run_at bigint, OUT last_seq bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_types text[] := p_types;
    v_portions integer[] := array_fill(p_limit / greatest(1, cardinality(p_types)) + 1, ARRAY[cardinality(p_types)]);
    v_is_cut boolean := true;
BEGIN
    WHILE v_is_cut LOOP
        WITH chosen AS MATERIALIZED (
            SELECT line.type, line.portion, first.place, first.run_at, first.seq
            FROM unnest(v_types, v_portions) AS line(type, portion)
            CROSS JOIN LATERAL (
                SELECT c.ctid AS place, c.run_at, c.seq FROM jobs AS c
                -- Bounds instead of `type = `: no other index gives this order, whatever the planner knows of the types.
                WHERE c.queue_id = p_queue_id AND c.state <= 1
                  AND (c.type, c.rank, c.run_at, c.seq) >= (line.type, p_rank, p_run_at, p_seq)
                  AND (c.type, c.rank, c.run_at) <= (line.type, p_rank, p_now)
                ORDER BY c.type, c.rank, c.run_at, c.seq LIMIT line.portion
            ) AS first
            ORDER BY first.run_at, first.seq LIMIT p_limit
        )
        SELECT (SELECT array_agg(chosen.place) FROM chosen), (SELECT array_agg(chosen.type) FROM chosen),
               (SELECT chosen.run_at FROM chosen LIMIT 1), (SELECT chosen.seq FROM chosen LIMIT 1),
               (SELECT chosen.run_at FROM chosen OFFSET p_limit - 1), (SELECT chosen.seq FROM chosen OFFSET p_limit - 1),
               array_agg(lines.type),
               array_agg(CASE WHEN lines.taken = lines.portion THEN lines.portion * 4 ELSE lines.taken + 1 END),
               bool_or(lines.taken = lines.portion)
        INTO places, types, run_at, seq, last_run_at, last_seq, v_types, v_portions, v_is_cut
        FROM (SELECT type, portion, count(*)::integer AS taken FROM chosen GROUP BY type, portion) AS lines;
    END LOOP;
END $$;
