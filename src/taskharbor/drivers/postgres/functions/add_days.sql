-- Add partitions of `finished` and `attempts` from the day before p_now to a week after it. A row of a day without a partition
-- goes to `*_rest`: nothing fails, but it is removed row by row.
CREATE OR REPLACE FUNCTION add_days(p_now bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_day CONSTANT bigint := 86400000000;
    v_table text;
    v_from bigint;
    v_name text;
    v_added integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(queue_lock(-1));
    FOREACH v_table IN ARRAY ARRAY['finished', 'attempts'] LOOP
        FOR i IN -1 .. 7 LOOP
            v_from := (p_now / v_day + i) * v_day;
            v_name := v_table || to_char(to_timestamp(v_from / 1000000) AT TIME ZONE 'UTC', '"_"YYYYMMDD');
            CONTINUE WHEN to_regclass(quote_ident(v_name)) IS NOT NULL;
            BEGIN
                -- Created first and attached then: that needs a weaker lock than CREATE TABLE ... PARTITION OF.
                EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS)', v_name, v_table);
                EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                               v_table, v_name, v_from, v_from + v_day);
                v_added := v_added + 1;
            EXCEPTION WHEN check_violation OR lock_not_available THEN
                -- Rows of that day are in the rest already, and stay there; or somebody reads the rest: try next time.
                NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN v_added;
END $$ SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '2s';
REVOKE EXECUTE ON FUNCTION add_days(bigint) FROM PUBLIC;
