-- The first job of each idempotency key of a write.
CREATE OR REPLACE VIEW staged_keys AS
SELECT DISTINCT ON (u.key COLLATE "C", q.id, s.write) u.key COLLATE "C" AS key, q.id AS queue_id, s.write, u.seq, u.id
FROM staged AS s JOIN queues AS q ON q.name = (s.batch).queue,
    unnest((s.batch).idempotency_keys, s.seqs, (s.batch).ids) AS u(key, seq, id)
WHERE s.seqs IS NOT NULL ORDER BY u.key COLLATE "C", q.id, s.write, u.seq;
