-- name: id_of
SELECT id FROM queues WHERE name = ?

-- name: add
INSERT INTO queues (name, paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us, declaration)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- name: remove
DELETE FROM queues WHERE id = ?

-- name: count
-- Deltas of all counters, whether something became runnable, and the latest end of a lease (0: none ended).
UPDATE queues
SET scheduled = scheduled + ?, ready = ready + ?, blocked = blocked + ?, inflight = inflight + ?,
    done = done + ?, dead = dead + ?, cancelled = cancelled + ?,
    done_total = done_total + ?, dead_total = dead_total + ?, cancelled_total = cancelled_total + ?,
    stirred = stirred + ?, latest_end = max(latest_end, ?)
WHERE id = ?

-- name: earliest_scheduled
WITH RECURSIVE wanted (id) AS (SELECT :queue), /*levels*/
SELECT min((/*due*/)) FROM levels WHERE priority IS NOT NULL
