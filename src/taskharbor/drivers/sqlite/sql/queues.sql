-- name: id_of
SELECT id FROM queues WHERE name = ?

-- name: add
INSERT INTO queues (name, keep_done_us, keep_dead_us, keep_attempts_us) VALUES (?, ?, ?, ?)

-- name: remove
DELETE FROM queues WHERE id = ?

-- name: row
SELECT name, max_inflight, failure_queue FROM queues WHERE id = ?

-- name: count
-- Deltas of all counters, and whether something became runnable.
UPDATE queues
SET scheduled = scheduled + ?2, ready = ready + ?3, blocked = blocked + ?4, inflight = inflight + ?5,
    done = done + ?6, dead = dead + ?7, cancelled = cancelled + ?8,
    done_total = done_total + ?9, dead_total = dead_total + ?10, cancelled_total = cancelled_total + ?11,
    stirred = stirred + ?12
WHERE id = ?1

-- name: configure
UPDATE queues
SET paused = ?2, max_inflight = ?3, failure_queue = ?4, keep_done_us = ?5, keep_dead_us = ?6, keep_attempts_us = ?7,
    stirred = stirred + 1
WHERE id = ?1

-- name: settings
SELECT paused, max_inflight, failure_queue, keep_done_us, keep_dead_us, keep_attempts_us FROM queues WHERE name = ?
