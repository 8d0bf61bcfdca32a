-- History goes by whole days: a day that no queue keeps any more is dropped, and where some queues keep it longer, the rows of
-- the others are removed once. How many rows went.
CREATE OR REPLACE FUNCTION drop_days(p_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_day record;
    v_queue record;
    v_kept boolean;
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
        v_kept := false;
        v_here := 0;
        BEGIN
            -- Nobody else removes from this day while it is counted; the parent is locked only for the moment of the drop.
            EXECUTE format('LOCK TABLE %I IN SHARE ROW EXCLUSIVE MODE', v_day.name);
            FOR v_queue IN
                SELECT q.id, CASE v_day.parent WHEN 'finished' THEN q.keep_done_us ELSE q.keep_attempts_us END AS keep
                FROM queues AS q WHERE NOT EXISTS (SELECT FROM swept AS s WHERE s.day = v_day.name AND s.queue_id = q.id)
                ORDER BY 2 DESC NULLS FIRST
            LOOP
                IF v_queue.keep IS NULL OR v_day.until > p_now - v_queue.keep THEN
                    -- Somebody keeps it, but only where they have something there.
                    IF NOT v_kept THEN
                        EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE queue_id = $1)', v_day.name)
                        INTO v_kept USING v_queue.id;
                    END IF;
                ELSIF v_kept THEN
                    v_here := v_here + empty_day(v_day.parent, v_day.name, v_queue.id);
                    INSERT INTO swept VALUES (v_day.name, v_queue.id);
                END IF;
            END LOOP;
            IF NOT v_kept THEN
                v_here := v_here + empty_day(v_day.parent, v_day.name, NULL);
                EXECUTE format('DROP TABLE %I', v_day.name);
                DELETE FROM swept WHERE day = v_day.name;
            END IF;
            v_gone := v_gone + v_here;
        EXCEPTION WHEN lock_not_available THEN
            -- Somebody reads the history: next time. Waiting would hold up everybody behind this lock.
            NULL;
        END;
    END LOOP;
    RETURN v_gone;
END $$ SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '100ms';
REVOKE EXECUTE ON FUNCTION drop_days(bigint) FROM PUBLIC;
