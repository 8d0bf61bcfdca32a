-- A log as eight workers leave it behind: rows of one transaction, with the texts a real one carries.
INSERT INTO taskharbor.attempts (fence, created_at, run_at, reserved_at, lease_expires_at, ended_at, queue_id, payload_size, rank,
                                 outcome, state, job_id, type, worker, error_type, error_message)
SELECT 1, t.at, t.at, t.at + 2000, t.at + 60000000, t.at + 9000, 1, 120, 0,
       CASE WHEN n %% 20 = 0 THEN 1 ELSE 0 END, CASE WHEN n %% 20 = 0 THEN 0 ELSE 4 END,
       '01JCX5ZK' || lpad(n::text, 18, '0'), 'send_receipt', 'host-' || n %% 8 || '-4711',
       CASE WHEN n %% 20 = 0 THEN 'TimeoutError' END, CASE WHEN n %% 20 = 0 THEN 'no answer from mail.example within 10 s' END
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n,
     LATERAL (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint + n AS at) AS t
