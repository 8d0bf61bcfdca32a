-- The ranks of a queue's waiting jobs, found by one seek each.
CREATE OR REPLACE FUNCTION waiting_ranks(p_queue_id integer) RETURNS smallint[] LANGUAGE sql STABLE
RETURN (
        WITH RECURSIVE r(rank) AS (
            (SELECT j.rank FROM jobs AS j WHERE j.queue_id = p_queue_id AND j.state <= 1
             ORDER BY j.rank, j.run_at, j.seq LIMIT 1)
            UNION ALL
            SELECT (SELECT j.rank FROM jobs AS j WHERE j.queue_id = p_queue_id AND j.state <= 1 AND j.rank > r.rank
                    ORDER BY j.rank, j.run_at, j.seq LIMIT 1)
            FROM r WHERE r.rank IS NOT NULL
        )
        SELECT coalesce(array_agg(r.rank), '{}') FROM r WHERE r.rank IS NOT NULL
);
