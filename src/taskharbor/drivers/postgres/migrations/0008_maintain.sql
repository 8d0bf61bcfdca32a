-- What keeps the store small: folding moves, days of history that come and go.

-- Fold moves into `totals`, at most every p_every seconds; who finds another at it goes away. How many were folded.
CREATE FUNCTION fold(p_every double precision) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_upkeep upkeep;
    v_folded integer;
BEGIN
    SELECT * INTO v_upkeep FROM upkeep FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR v_upkeep.folded_at > clock_timestamp() - make_interval(secs => p_every) THEN
        RETURN 0;
    END IF;
    WITH gone AS (
        DELETE FROM moves WHERE xid < v_upkeep.horizon RETURNING *
    ), summed AS (
        SELECT queue_id, count(*) AS rows, max(high_run_at) AS high_run_at, max(latest_end) AS latest_end,
               sum(scheduled) AS scheduled, sum(ready) AS ready, sum(blocked) AS blocked, sum(inflight) AS inflight,
               sum(done) AS done, sum(dead) AS dead, sum(cancelled) AS cancelled,
               sum(done_total) AS done_total, sum(dead_total) AS dead_total, sum(cancelled_total) AS cancelled_total
        FROM gone GROUP BY queue_id
    ), added AS (
        INSERT INTO totals AS t (queue_id, folded, high_run_at, latest_end, scheduled, ready, blocked, inflight, done, dead,
                                 cancelled, done_total, dead_total, cancelled_total)
        SELECT queue_id, v_upkeep.horizon, high_run_at, latest_end, scheduled, ready, blocked, inflight, done, dead,
               cancelled, done_total, dead_total, cancelled_total
        FROM summed ORDER BY queue_id
        ON CONFLICT (queue_id) DO UPDATE SET
            folded = excluded.folded,
            high_run_at = greatest(t.high_run_at, excluded.high_run_at),
            latest_end = greatest(t.latest_end, excluded.latest_end),
            scheduled = t.scheduled + excluded.scheduled, ready = t.ready + excluded.ready,
            blocked = t.blocked + excluded.blocked, inflight = t.inflight + excluded.inflight,
            done = t.done + excluded.done, dead = t.dead + excluded.dead, cancelled = t.cancelled + excluded.cancelled,
            done_total = t.done_total + excluded.done_total, dead_total = t.dead_total + excluded.dead_total,
            cancelled_total = t.cancelled_total + excluded.cancelled_total
    )
    SELECT coalesce(sum(rows), 0) INTO v_folded FROM summed;
    -- A try that the server has not read after an hour will never be read.
    DELETE FROM repeated WHERE made_at < clock_timestamp() - interval '1 hour';
    UPDATE upkeep SET folded_at = clock_timestamp(), horizon = pg_snapshot_xmin(pg_current_snapshot());
    RETURN v_folded;
END $$ SET search_path FROM CURRENT;

-- Days of `finished` and `attempts` from the day before p_now to a week after it. A row of a day that has no partition goes to
-- `*_rest`: nothing fails, it is only removed row by row.
CREATE FUNCTION add_days(p_now bigint) RETURNS integer LANGUAGE plpgsql AS $$
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
                -- Made first and attached then: that asks for a weaker lock than CREATE TABLE ... PARTITION OF.
                EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS)', v_name, v_table);
                EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                               v_table, v_name, v_from, v_from + v_day);
                v_added := v_added + 1;
            EXCEPTION WHEN check_violation OR lock_not_available THEN
                -- Rows of that day are among the rest already, and stay there; or somebody reads the rest: next time.
                NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN v_added;
END $$ SECURITY DEFINER SET search_path FROM CURRENT SET lock_timeout = '2s';

-- The days of `finished` and `attempts`, oldest first: the table, its parent, and the instant at which the day was over.
CREATE FUNCTION days(OUT parent text, OUT name text, OUT until bigint) RETURNS SETOF record LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT p.relname::text, c.relname::text,
           substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''?(-?\d+)''?\)')::bigint
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid JOIN pg_class AS p ON p.oid = i.inhparent
    WHERE i.inhparent IN ('finished'::regclass, 'attempts'::regclass) AND pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT'
    ORDER BY c.relname;
END;

-- Note the last row of the log that retention removes. Rows of earlier epochs have numbers of another cluster.
CREATE FUNCTION note_trimmed(p_xid xid8, p_seq bigint) RETURNS void LANGUAGE sql
BEGIN ATOMIC
    UPDATE epochs SET trimmed_xid = p_xid, trimmed_seq = p_seq
    WHERE epoch = (SELECT max(e.epoch) FROM epochs AS e) AND (trimmed_xid, trimmed_seq) < (p_xid, p_seq);
END;

-- Take a queue's rows out of a day, or all rows (p_queue_id NULL), with what belongs to them. How many there were.
CREATE FUNCTION empty_day(p_parent text, p_name text, p_queue_id integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_rows bigint;
BEGIN
    IF p_parent = 'finished' THEN
        EXECUTE format('DELETE FROM idempotency AS i USING %I AS f
                        WHERE i.queue_id = f.queue_id AND i.idempotency_key = f.idempotency_key AND i.job_seq = f.seq
                          AND ($1 IS NULL OR f.queue_id = $1)', p_name) USING p_queue_id;
        EXECUTE format('DELETE FROM idempotency AS i USING %I AS f
                        WHERE i.is_led AND i.job_seq = f.seq AND ($1 IS NULL OR f.queue_id = $1)', p_name) USING p_queue_id;
        EXECUTE format(
            'WITH gone AS (INSERT INTO moves (queue_id, done, cancelled)
                 SELECT queue_id, -count(*) FILTER (WHERE state = 4), -count(*) FILTER (WHERE state = 6)
                 FROM %I WHERE $1 IS NULL OR queue_id = $1 GROUP BY queue_id RETURNING done + cancelled AS jobs)
             SELECT -coalesce(sum(jobs), 0) FROM gone', p_name) INTO v_rows USING p_queue_id;
    ELSE
        EXECUTE format('SELECT count(*) FROM %I WHERE $1 IS NULL OR queue_id = $1', p_name) INTO v_rows USING p_queue_id;
        EXECUTE format(
            'SELECT note_trimmed(xid, seq) FROM (
                 SELECT xid, seq FROM %I WHERE ($1 IS NULL OR queue_id = $1) AND seq > (SELECT max(last_seq) FROM epochs)
                 ORDER BY xid DESC, seq DESC LIMIT 1) AS last', p_name) USING p_queue_id;
    END IF;
    IF p_queue_id IS NOT NULL THEN
        EXECUTE format('DELETE FROM %I WHERE queue_id = $1', p_name) USING p_queue_id;
    END IF;
    RETURN v_rows;
END $$;

-- History goes by whole days: a day that no queue keeps any more is dropped, and where some queues keep it longer, the rows of
-- the others are removed once. How many rows went.
CREATE FUNCTION drop_days(p_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
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
    FOR v_day IN SELECT * FROM days() WHERE until <= p_now LOOP
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

-- Retention row by row, for what belongs to no day, and for the dead. How many rows went.
CREATE FUNCTION prune(p_now bigint, p_limit integer) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_queue queues;
    v_jobs integer := 0;
    v_rows integer := 0;
    v_here integer;
    v_has_jobs boolean := EXISTS (SELECT FROM finished_rest);
    v_has_rows boolean := EXISTS (SELECT FROM attempts_rest);
BEGIN
    FOR v_queue IN SELECT * FROM queues ORDER BY id LOOP
        IF v_has_jobs THEN
            v_jobs := v_jobs + remove_ended('finished_rest', v_queue.id, 4::smallint, p_now - v_queue.keep_done_us + 1,
                                            p_limit - v_jobs);
            v_jobs := v_jobs + remove_ended('finished_rest', v_queue.id, 6::smallint, p_now - v_queue.keep_done_us + 1,
                                            p_limit - v_jobs);
        END IF;
        v_jobs := v_jobs + remove_ended('dead', v_queue.id, 5::smallint, p_now - v_queue.keep_dead_us + 1, p_limit - v_jobs);
        IF v_has_rows AND v_queue.keep_attempts_us IS NOT NULL AND v_rows < p_limit THEN
            WITH gone AS (
                DELETE FROM attempts_rest WHERE ctid = ANY (ARRAY(
                    SELECT a.ctid FROM attempts_rest AS a
                    WHERE a.queue_id = v_queue.id AND a.ended_at <= p_now - v_queue.keep_attempts_us
                    LIMIT p_limit - v_rows FOR UPDATE SKIP LOCKED)) RETURNING xid, seq
            ), last AS (
                SELECT xid, seq FROM gone WHERE seq > (SELECT max(last_seq) FROM epochs) ORDER BY xid DESC, seq DESC LIMIT 1
            )
            SELECT (SELECT count(*) FROM gone), (SELECT note_trimmed(xid, seq) FROM last) INTO v_here;
            v_rows := v_rows + v_here;
        END IF;
    END LOOP;
    RETURN v_jobs + v_rows;
END $$ SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;

-- A new epoch of the log where the tables have come to another cluster. Returns the present one.
CREATE FUNCTION begin_epoch() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_epoch epochs;
    v_system bigint := (SELECT system_identifier FROM pg_control_system());
BEGIN
    PERFORM pg_advisory_xact_lock(queue_lock(-2));
    SELECT * INTO v_epoch FROM epochs ORDER BY epoch DESC LIMIT 1;
    IF v_epoch.system_id <> v_system THEN
        INSERT INTO epochs VALUES (v_epoch.epoch + 1, v_system, coalesce(pg_sequence_last_value('attempt_seq'), 0));
        -- The numbers in `moves` mean nothing here either: all of it belongs to the past.
        -- A try that the server has not read after an hour will never be read.
    DELETE FROM repeated WHERE made_at < clock_timestamp() - interval '1 hour';
    UPDATE upkeep SET folded_at = '-infinity', horizon = '18446744073709551615';
        PERFORM fold(0);
        UPDATE totals SET folded = pg_current_xact_id();
        RETURN v_epoch.epoch + 1;
    END IF;
    RETURN v_epoch.epoch;
END $$ SECURITY DEFINER SET search_path FROM CURRENT;

-- Upkeep is done with the rights of the tables' owner, by those who were given the right to have it done.
REVOKE EXECUTE ON FUNCTION add_days(bigint), drop_days(bigint), prune(bigint, integer), begin_epoch() FROM PUBLIC;
