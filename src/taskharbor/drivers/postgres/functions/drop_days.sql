-- Remove history by whole days. A day that no queue keeps any more is dropped. If some queues keep it longer, the rows of the
-- others are removed once. Returns the number of removed rows.
CREATE OR REPLACE FUNCTION drop_days(p_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_day record;
    v_due integer[];
    v_is_kept boolean;
    v_here bigint;
    v_gone bigint := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(queue_lock(-3)) THEN
        RETURN 0;
    END IF;
    FOR v_day IN
        SELECT * FROM (
            SELECT p.relname AS parent, c.relname AS name,
                   substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''?(-?\d+)''?\)')::bigint AS until
            FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid JOIN pg_class AS p ON p.oid = i.inhparent
            WHERE i.inhparent IN ('finished'::regclass, 'attempts'::regclass)
        ) AS days WHERE until <= p_now ORDER BY name
    LOOP
        BEGIN
            -- Nobody else removes from this day while it is counted. The parent is locked only for the moment of the drop.
            EXECUTE format('LOCK TABLE %I IN SHARE ROW EXCLUSIVE MODE', v_day.name);
            v_due := ARRAY(
                SELECT q.id FROM queues AS q
                WHERE v_day.until <= p_now - CASE v_day.parent WHEN 'finished' THEN q.keep_done_us ELSE q.keep_attempts_us END);
            EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE queue_id <> ALL ($1))', v_day.name) INTO v_is_kept USING v_due;
            IF v_is_kept THEN
                v_due := ARRAY(SELECT unnest(v_due) EXCEPT SELECT s.queue_id FROM swept AS s WHERE s.day = v_day.name);
                v_here := CASE WHEN v_due = '{}' THEN 0
                               ELSE remove_rows(quote_ident(v_day.name), format('j.queue_id = ANY (%L)', v_due)) END;
                INSERT INTO swept SELECT v_day.name, unnest(v_due);
            ELSE
                v_here := remove_rows(quote_ident(v_day.name), NULL);
                EXECUTE format('DROP TABLE %I', v_day.name);
                DELETE FROM swept WHERE day = v_day.name;
            END IF;
            v_gone := v_gone + v_here;
        EXCEPTION WHEN lock_not_available THEN
            -- Somebody reads the history: try next time. Waiting would block all callers behind this lock.
            NULL;
        END;
    END LOOP;
    RETURN v_gone;
END $$ SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '100ms';
REVOKE EXECUTE ON FUNCTION drop_days(bigint) FROM PUBLIC;
