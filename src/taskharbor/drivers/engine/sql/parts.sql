-- name: levels
-- The priorities of scheduled jobs in the queues `wanted`, for each queue the highest first: one seek per distinct priority.
levels (queue_id, priority) AS (
    SELECT id, (
        SELECT priority FROM jobs INDEXED BY jobs_scheduled WHERE queue_id = wanted.id AND state = 0 ORDER BY priority DESC LIMIT 1
    )
    FROM wanted
    UNION ALL
    SELECT levels.queue_id, (
        SELECT priority FROM jobs INDEXED BY jobs_scheduled
        WHERE queue_id = levels.queue_id AND state = 0 AND priority < levels.priority ORDER BY priority DESC LIMIT 1
    )
    FROM levels WHERE levels.priority IS NOT NULL
)

-- name: due
-- The time of the first scheduled job of a level after an instant.
SELECT run_at FROM jobs INDEXED BY jobs_scheduled
WHERE queue_id = levels.queue_id AND state = 0 AND priority = levels.priority AND run_at > :since ORDER BY run_at LIMIT 1
