-- Begin a new epoch of the log if the tables have moved to another cluster. Returns the present epoch.
CREATE OR REPLACE FUNCTION begin_epoch() RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(queue_lock(-2));
    INSERT INTO epochs
    SELECT e.epoch + 1, c.system_identifier, e.trimmed_xid, e.trimmed_seq
    FROM (SELECT * FROM epochs ORDER BY epoch DESC LIMIT 1) AS e, pg_control_system() AS c
    WHERE e.system_id <> c.system_identifier;
    IF FOUND THEN
        -- The transaction numbers in `moves` mean nothing here either: all of them count as past.
        UPDATE upkeep SET folded_at = '-infinity', horizon = '18446744073709551615';
        PERFORM fold(0);
        UPDATE moves SET folded = pg_current_xact_id() WHERE folded IS NOT NULL;
    END IF;
    RETURN (SELECT max(epoch) FROM epochs);
END $$ SECURITY DEFINER SET search_path FROM CURRENT;
REVOKE EXECUTE ON FUNCTION begin_epoch() FROM PUBLIC;
