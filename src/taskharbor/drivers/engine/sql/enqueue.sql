-- name: insert
-- `/*column*/` is a value of its own for each job, or one for all of them.
INSERT INTO jobs (
    seq, queue_id, state, priority, run_at, created_at, max_attempts, max_stalls, id, type, spec, payload_size, payload
)
SELECT /*seq*/, /*queue_id*/, /*run_at*/ <= ?1, /*priority*/, /*run_at*/, /*created_at*/, /*max_attempts*/, /*max_stalls*/,
    /*id*/, /*type*/, /*spec*/, length(/*payload*/), CASE WHEN length(/*payload*/) <= ?2 THEN /*payload*/ END
FROM (VALUES /*rows*/) WHERE true
ON CONFLICT (id) DO NOTHING

-- name: count
UPDATE queues SET ready = ready + ?, scheduled = scheduled + ?, stirred = stirred + ? WHERE id = ?

-- name: last_seq
SELECT coalesce(max(seq), 0) FROM jobs

-- name: ids_after
SELECT json_group_array(id) FROM jobs WHERE seq > ?

-- name: seqs_by_id
SELECT json_group_array(json_array(jobs.id, jobs.seq))
FROM json_each(?) AS wanted CROSS JOIN jobs ON jobs.id = wanted.value

-- name: insert_payload
INSERT INTO payloads (seq, body) VALUES /*rows: 2*/

-- name: known_idempotency
SELECT json_group_array(json_array(known.queue_id, known.idempotency_key, known.job_id))
FROM json_each(?) AS wanted
CROSS JOIN idempotency AS known
    ON known.queue_id = wanted.value ->> 0 AND known.idempotency_key = wanted.value ->> 1

-- name: insert_idempotency
INSERT INTO idempotency (queue_id, idempotency_key, job_id) VALUES /*rows: 3*/
