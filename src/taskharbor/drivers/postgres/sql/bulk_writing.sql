-- name: stage
INSERT INTO $schema.staged (write, task, number, queue, jobs, are_alike, ids, types, run_ats, created_ats, ranks, max_attempts,
                            headers, codecs, timeouts_us, max_stalls, backoff_mins, backoff_maxs, flags, idempotency_keys, by_rules, locks,
                            ends,
                            payloads)
SELECT %s, %s, %s::integer, %s, %s::integer, %s::boolean, %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::smallint[],
       %s::integer[], %s::text[], %s::text[], %s::bigint[], %s::integer[], %s::bigint[], %s::bigint[], %s::smallint[], %s::text[], %s::json,
       %s::integer, %b::integer[], %b::bytea
WHERE $schema.may_stage(%s, %s, %s::bigint)

-- name: complete
INSERT INTO $schema.staged (write, task, number, is_last)
SELECT %s, %s, %s::integer, true WHERE $schema.may_stage(%s, %s, %s::bigint)

-- name: publish
SELECT $schema.publish_write(%s, %s, %s::bigint, %s::text[], %s::bigint, %s::smallint, %s)

-- name: abandon
SELECT $schema.abandon_write(%s, %s, %s::bigint)
