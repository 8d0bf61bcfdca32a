-- name: notify
SELECT pg_notify(%s, queue) FROM unnest(%s::text[]) AS queue
