-- Jobs that are due a day from now and later, a millisecond apart.
INSERT INTO jobs (id, queue_id, type, run_at, created_at, rank, max_attempts, state, payload)
SELECT '00000001-0000-7000-8000-' || lpad(n::text, 12, '0'), queue_id_of('default'),
       (%(types)s::text[])[1 + mod(n, cardinality(%(types)s::text[]))],
       made + 86400000000 + n::bigint * 1000, made, 0, 3, 0, '0'
FROM generate_series(1, %(count)s) AS n, LATERAL (SELECT (extract(epoch FROM now()) * 1000000)::bigint AS made) AS at;

INSERT INTO moves (queue_id, scheduled, ranks, low_run_at)
SELECT queue_id_of('default'), %(count)s, '{0}', min(run_at) FROM jobs WHERE state = 0;
