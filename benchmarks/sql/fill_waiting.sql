-- Jobs that could be claimed at once: due a microsecond apart, the last of them now.
INSERT INTO jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
SELECT '00000000-0000-7000-8000-' || lpad(n::text, 12, '0'), queue_id_of('default'),
       (%(types)s::text[])[1 + mod(n, cardinality(%(types)s::text[]))], due, due, 0, 3, 1, '0'
FROM generate_series(1, %(count)s) AS n,
     LATERAL (SELECT (extract(epoch FROM now()) * 1000000)::bigint - %(count)s + n AS due) AS at;

INSERT INTO moves (queue_id, ready, ranks, low_run_at, high_run_at)
SELECT queue_id_of('default'), %(count)s, '{0}', min(run_at), max(run_at) FROM jobs WHERE state = 1;
