-- Jobs that are done, each with its row of the log, ten microseconds apart, the last of them a minute ago.
INSERT INTO finished (seq, run_at, created_at, finished_at, fence, queue_id, max_attempts, attempts, stalls, rank, state, id,
                      type, payload)
SELECT nextval('job_seq'), ended, ended, ended, 1, queue_id_of('default'), 3, 0, 0, 0, 4,
       '00000002-0000-7000-8000-' || lpad(n::text, 12, '0'),
       (%(types)s::text[])[1 + mod(n, cardinality(%(types)s::text[]))], '0'
FROM generate_series(1, %(count)s) AS n,
     LATERAL (SELECT (extract(epoch FROM now()) * 1000000)::bigint - 60000000 - (%(count)s - n) * 10 AS ended) AS at;

INSERT INTO attempts (job_id, queue_id, type, rank, fence, worker, created_at, run_at, reserved_at, lease_expires_at,
                      ended_at, outcome, state, payload_size)
SELECT id, queue_id, type, rank, fence, 'bench', created_at, run_at, run_at, run_at + 60000000, finished_at, 0, 4, 1
FROM finished;

INSERT INTO moves (queue_id, done, done_total, latest_end)
SELECT queue_id_of('default'), %(count)s, %(count)s, max(finished_at) FROM finished;
