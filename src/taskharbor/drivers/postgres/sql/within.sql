-- Where a transaction's snapshot stands still (REPEATABLE READ, SERIALIZABLE), jobs of a key that came after it cannot be seen,
-- so no rule about keys can be kept. Then nothing is done, and no row comes back.
-- name: by_key
SELECT job_id, existed FROM $schema.enqueue_by_rules(
    CASE WHEN current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN %s::json END,
    %b::bytea, %s::integer[], %s::bigint, %s::smallint, %s::boolean)
