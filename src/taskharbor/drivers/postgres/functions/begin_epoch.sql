-- A new epoch of the log where the tables have come to another cluster. Returns the present one.
CREATE OR REPLACE FUNCTION begin_epoch() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_epoch epochs;
    v_system bigint := (SELECT system_identifier FROM pg_control_system());
BEGIN
    PERFORM pg_advisory_xact_lock(queue_lock(-2));
    SELECT * INTO v_epoch FROM epochs ORDER BY epoch DESC LIMIT 1;
    IF v_epoch.system_id <> v_system THEN
        INSERT INTO epochs VALUES (v_epoch.epoch + 1, v_system, coalesce(pg_sequence_last_value('attempt_seq'), 0));
        -- The numbers in `moves` mean nothing here either: all of it belongs to the past.
        UPDATE upkeep SET folded_at = '-infinity', horizon = '18446744073709551615';
        PERFORM fold(0);
        UPDATE moves SET folded = pg_current_xact_id() WHERE folded IS NOT NULL;
        RETURN v_epoch.epoch + 1;
    END IF;
    RETURN v_epoch.epoch;
END $$ SECURITY DEFINER SET search_path FROM CURRENT;
REVOKE EXECUTE ON FUNCTION begin_epoch() FROM PUBLIC;
