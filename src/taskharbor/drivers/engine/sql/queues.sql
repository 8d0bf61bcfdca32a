-- name: id_of
SELECT id FROM queues WHERE name = ?

-- name: add
INSERT INTO queues (name, paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us)
VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: remove
DELETE FROM queues WHERE id = ?

-- name: row
SELECT name, max_inflight, failure_queue FROM queues WHERE id = ?

-- name: count
-- Deltas of all counters, whether something became runnable, and the latest end of a lease (0: none ended).
UPDATE queues
SET scheduled = scheduled + ?, ready = ready + ?, blocked = blocked + ?, inflight = inflight + ?,
    done = done + ?, dead = dead + ?, cancelled = cancelled + ?,
    done_total = done_total + ?, dead_total = dead_total + ?, cancelled_total = cancelled_total + ?,
    stirred = stirred + ?, latest_end = max(latest_end, ?)
WHERE id = ?

-- name: configure
UPDATE queues
SET paused = ?, max_inflight = ?, failure_queue = ?, keep_done_us = ?, keep_dead_us = ?, keep_attempts_us = ?,
    stirred = stirred + 1
WHERE id = ?

-- name: settings
SELECT paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us FROM queues WHERE name = ?

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
