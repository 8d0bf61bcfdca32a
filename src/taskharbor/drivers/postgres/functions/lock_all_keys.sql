-- Lock all keys until the end of the transaction. Gives up soon if another transaction lasts, because later callers wait behind
-- it.
CREATE OR REPLACE FUNCTION lock_all_keys() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(queue_lock(-4));
    PERFORM set_config('taskharbor.holds_all_keys', 'on', true);
EXCEPTION WHEN lock_not_available THEN
    RAISE serialization_failure USING MESSAGE = 'somebody holds keys for long';
END $$ SET search_path FROM CURRENT SET lock_timeout = '3s';
