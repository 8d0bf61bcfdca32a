-- name: insert
INSERT INTO jobs (
    queue_id, state, priority, run_at, created_at, max_attempts, max_stalls, id, type, job_key, spec,
    payload_size, payload, seq
)
VALUES /*rows: 14*/
ON CONFLICT (id) DO NOTHING

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

-- name: earliest_scheduled
-- One seek per distinct priority, however many jobs are scheduled.
WITH RECURSIVE levels (priority) AS (
    SELECT (SELECT priority FROM jobs INDEXED BY jobs_scheduled WHERE queue_id = :queue AND state = 0 ORDER BY priority DESC LIMIT 1)
    UNION ALL
    SELECT (
        SELECT priority FROM jobs INDEXED BY jobs_scheduled
        WHERE queue_id = :queue AND state = 0 AND priority < levels.priority ORDER BY priority DESC LIMIT 1
    )
    FROM levels WHERE levels.priority IS NOT NULL
)
SELECT min((
    SELECT run_at FROM jobs INDEXED BY jobs_scheduled
    WHERE queue_id = :queue AND state = 0 AND priority = levels.priority ORDER BY run_at LIMIT 1
))
FROM levels WHERE priority IS NOT NULL
