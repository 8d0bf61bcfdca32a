-- Jobs by the million: put down by many tasks where nobody sees them, then published in one transaction.

-- A row holds thousands of jobs of one queue as arrays, so that staging, finding and forgetting them costs next to nothing per
-- job. Unlogged: what a crash of the server takes away was visible to nobody, and publishing finds that it is gone.
CREATE UNLOGGED TABLE staged (
    write          text COLLATE "C" NOT NULL,
    task           text COLLATE "C" NOT NULL,
    -- Counts up within the task. A last row without jobs says that the task is complete, and by its number how many came before.
    number         integer NOT NULL,
    is_last        boolean NOT NULL DEFAULT false,
    staged_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    queue          text COLLATE "C",
    jobs           integer NOT NULL DEFAULT 0,
    -- Jobs that differ in nothing but their payloads: the arrays of columns hold one value, which stands for all of them. They
    -- have no ids, but get them when they are published: in the order of the jobs, which spares the index a search for each.
    are_alike      boolean NOT NULL DEFAULT false,
    -- Columns of `jobs`; an array that is NULL stands for the default in all of them.
    ids            text[],
    types          text[],
    run_ats        bigint[],
    created_ats    bigint[],
    ranks          smallint[],
    max_attempts   integer[],
    headers        text[],
    codecs         text[],
    timeouts_us    bigint[],
    max_stalls     integer[],
    backoff_mins   bigint[],
    backoff_maxs   bigint[],
    flags          smallint[],
    -- Of all jobs of the row, or of none. Who publishes such jobs gives them their numbers before anything else.
    idempotency_keys text[],
    seqs           bigint[],
    -- Jobs with keys, as `enqueue_by_rules` takes them, instead of the arrays; and how many locks it takes.
    by_rules       json,
    locks          integer,
    ends           integer[],
    payloads       bytea
) WITH (autovacuum_vacuum_threshold = 100);
CREATE INDEX staged_write ON staged (write);
-- Compressing what is read once, a moment later, would cost more than all the rest.
ALTER TABLE staged ALTER COLUMN ids SET STORAGE EXTERNAL, ALTER COLUMN types SET STORAGE EXTERNAL,
    ALTER COLUMN run_ats SET STORAGE EXTERNAL, ALTER COLUMN created_ats SET STORAGE EXTERNAL,
    ALTER COLUMN ranks SET STORAGE EXTERNAL, ALTER COLUMN max_attempts SET STORAGE EXTERNAL,
    ALTER COLUMN ends SET STORAGE EXTERNAL, ALTER COLUMN by_rules SET STORAGE EXTERNAL,
    ALTER COLUMN idempotency_keys SET STORAGE EXTERNAL, ALTER COLUMN seqs SET STORAGE EXTERNAL,
    ALTER COLUMN payloads SET STORAGE EXTERNAL;

-- Writes that were published, so that publishing one again changes nothing. A series of numbered writes (the batches of a
-- stream) has one row, with the latest number: earlier ones are never published after it. A write of its own has number -1.
-- jobs NULL: abandoned, so that a task that comes late leaves nothing behind.
CREATE TABLE published (
    series         text COLLATE "C" PRIMARY KEY,
    number         bigint NOT NULL,
    published_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    jobs           bigint
);

-- Blobs of bulk writes that come through the driver contract (see `taskharbor.bulk`), and the record of decisions about them.
CREATE TABLE blobs (
    name           text COLLATE "C" PRIMARY KEY,
    data           bytea NOT NULL
);
ALTER TABLE blobs ALTER COLUMN data SET STORAGE EXTERNAL;

-- The last portion of a series' write that became jobs: it stands here in the same transaction, so no portion does so twice.
CREATE TABLE portions (
    series         text COLLATE "C" PRIMARY KEY,
    number         bigint NOT NULL,
    portion        integer NOT NULL,
    added          bigint NOT NULL,
    noted_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The advisory lock of a write: whoever stages holds it shared, whoever publishes or abandons alone. So nothing is staged behind
-- the back of one who has just looked what there is.
CREATE FUNCTION write_lock(p_write text) RETURNS bigint LANGUAGE sql STABLE
RETURN hashtextextended(p_write, 'staged'::regclass::oid::bigint);

-- Whether a task may stage for a write: not once it was published or abandoned. Then the task is late, or the batch of a stream
-- is done over. Volatile, so that it looks after it has the lock and not before.
CREATE FUNCTION may_stage(p_write text, p_series text, p_number bigint) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(write_lock(p_write));
    RETURN NOT EXISTS (SELECT FROM published WHERE series = p_series AND number >= p_number);
END $$ SET search_path FROM CURRENT;

-- What writers left behind that died, and writes that nobody will publish again.
CREATE FUNCTION forget_old_writes() RETURNS void LANGUAGE sql
BEGIN ATOMIC
    DELETE FROM staged WHERE write IN (
        SELECT write FROM staged GROUP BY write HAVING max(staged_at) < clock_timestamp() - interval '3 days');
    DELETE FROM published
    WHERE published_at < clock_timestamp() - CASE WHEN number < 0 THEN interval '30 days' ELSE interval '400 days' END;
    DELETE FROM portions
    WHERE noted_at < clock_timestamp() - CASE WHEN number < 0 THEN interval '30 days' ELSE interval '400 days' END;
END;

-- As before, one number per key. But whoever asks for one now holds the lock of all keys shared; and who holds that alone (see
-- `lock_all_keys`) needs no other. Still called before the lock of the key is taken, by everybody who takes one.
CREATE OR REPLACE FUNCTION key_lock(p_queue_id integer, p_kind text, p_key text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('taskharbor.holds_all_keys', true) = 'on' THEN
        RETURN queue_lock(-4);
    END IF;
    PERFORM pg_advisory_xact_lock_shared(queue_lock(-4));
    RETURN hashtextextended(p_kind || p_key, 'queues'::regclass::oid::bigint * 31 + p_queue_id);
END $$;

-- Until the end of the transaction. Gives up soon where somebody else's transaction lasts: those who come later stand in line.
CREATE FUNCTION lock_all_keys() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(queue_lock(-4));
    PERFORM set_config('taskharbor.holds_all_keys', 'on', true);
END $$ SET search_path FROM CURRENT SET lock_timeout = '3s';

-- The first job of each idempotency key of a write.
CREATE VIEW staged_keys AS
SELECT DISTINCT ON (u.key COLLATE "C", q.id, s.write) u.key COLLATE "C" AS key, q.id AS queue_id, s.write, u.seq, u.id
FROM staged AS s JOIN queues AS q ON q.name = s.queue, unnest(s.idempotency_keys, s.seqs, s.ids) AS u(key, seq, id)
WHERE s.idempotency_keys IS NOT NULL ORDER BY u.key COLLATE "C", q.id, s.write, u.seq;

-- Give the jobs of a write that have idempotency keys their numbers, and put a row into `idempotency` for the first job of each
-- key. Whether each job has one: those without do not become jobs.
CREATE FUNCTION claim_idempotency_keys(p_write text, p_tasks text[]) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_given bigint := 0;
    v_claimed bigint;
    v_found record;
    v_known text;
BEGIN
    FOR v_found IN
        SELECT s.ctid, s.jobs FROM staged AS s WHERE s.write = p_write AND s.idempotency_keys IS NOT NULL
        ORDER BY array_position(p_tasks, s.task), s.number
    LOOP
        UPDATE staged SET seqs = ARRAY(SELECT nextval('job_seq') FROM generate_series(1, v_found.jobs)) WHERE ctid = v_found.ctid;
        v_given := v_given + v_found.jobs;
    END LOOP;
    -- As in `enqueue_by_rules`: in one order for everybody. No lock is held for it: who comes with the same key meets the row. To
    -- look for each key before its row is stored costs two thirds more, so that is done only where one is known.
    BEGIN
        INSERT INTO idempotency (queue_id, idempotency_key, job_seq, job_id)
        SELECT k.queue_id, k.key, k.seq, k.id FROM staged_keys AS k WHERE k.write = p_write ORDER BY k.key, k.queue_id;
    EXCEPTION WHEN unique_violation THEN
        INSERT INTO idempotency (queue_id, idempotency_key, job_seq, job_id)
        SELECT k.queue_id, k.key, k.seq, k.id FROM staged_keys AS k WHERE k.write = p_write ORDER BY k.key, k.queue_id
        ON CONFLICT DO NOTHING;
    END;
    GET DIAGNOSTICS v_claimed = ROW_COUNT;
    IF v_claimed = v_given THEN
        RETURN true;
    END IF;
    -- Keys that lead to jobs that are gone lead to these from now on.
    FOR v_found IN
        SELECT k.* FROM staged_keys AS k JOIN idempotency AS i ON i.queue_id = k.queue_id AND i.idempotency_key = k.key
        WHERE k.write = p_write AND i.job_seq <> k.seq AND NOT is_kept(i.job_id) ORDER BY k.key, k.queue_id
    LOOP
        SELECT i.job_id INTO v_known FROM idempotency AS i
        WHERE i.queue_id = v_found.queue_id AND i.idempotency_key = v_found.key FOR UPDATE;
        IF NOT is_kept(v_known) THEN
            UPDATE idempotency SET job_seq = v_found.seq, job_id = v_found.id, is_led = false
            WHERE queue_id = v_found.queue_id AND idempotency_key = v_found.key;
        END IF;
    END LOOP;
    RETURN false;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET work_mem = '64MB';

-- Make the jobs of these tasks visible and forget those of all others. How many became jobs. p_id_head and a number of eight
-- hexadecimal digits make an id that nobody has.
CREATE FUNCTION publish_write(
    p_write text, p_series text, p_number bigint, p_tasks text[], p_now bigint, p_stir smallint, p_id_head text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_missing text;
    v_locks bigint;
    v_chunk record;
    v_added bigint;
    v_jobs bigint := 0;
    v_are_new boolean;
BEGIN
    -- Whoever publishes the same write at the same moment waits here, and then finds it done.
    PERFORM pg_advisory_xact_lock(write_lock(p_write));
    INSERT INTO published AS p (series, number, jobs) VALUES (p_series, p_number, 0)
    ON CONFLICT (series) DO UPDATE SET number = excluded.number, published_at = excluded.published_at, jobs = 0
    WHERE p.number < excluded.number;
    IF NOT FOUND THEN
        DELETE FROM staged WHERE write = p_write;
        RETURN (SELECT CASE WHEN number = p_number THEN coalesce(jobs, 0) ELSE 0 END FROM published WHERE series = p_series);
    END IF;

    SELECT string_agg(m.task, ', ') INTO v_missing FROM (
        SELECT unnest(p_tasks) AS task
        EXCEPT SELECT s.task FROM staged AS s WHERE s.write = p_write GROUP BY s.task
               HAVING max(s.number) FILTER (WHERE s.is_last) = count(*) - 1
    ) AS m;
    IF v_missing IS NOT NULL THEN
        RAISE EXCEPTION 'what the tasks % of this write had staged is gone', v_missing USING ERRCODE = 'TH001';
    END IF;
    DELETE FROM staged WHERE write = p_write AND task <> ALL (p_tasks);

    SELECT coalesce(sum(s.locks), 0) INTO v_locks FROM staged AS s WHERE s.write = p_write;
    IF v_locks > 0 THEN
        -- A lock for every key, until the end of the transaction, is too much for the table of locks that all who use the server
        -- share. Whoever needs that many takes one for all keys instead, and holds up everybody else who has to do with keys.
        IF v_locks > current_setting('max_locks_per_transaction')::bigint * current_setting('max_connections')::bigint / 2 THEN
            PERFORM lock_all_keys();
        END IF;
        FOR v_chunk IN
            SELECT s.by_rules, s.payloads || ''::bytea AS payloads, s.ends FROM staged AS s
            WHERE s.write = p_write AND s.by_rules IS NOT NULL
            ORDER BY array_position(p_tasks, s.task), s.number
        LOOP
            SELECT count(*) FILTER (WHERE NOT e.existed) INTO v_added
            FROM enqueue_by_rules(v_chunk.by_rules, v_chunk.payloads, v_chunk.ends, p_now, p_stir, false) AS e;
            v_jobs := v_jobs + v_added;
        END LOOP;
    END IF;

    PERFORM queue_id_of(n.queue) FROM (
        SELECT DISTINCT s.queue FROM staged AS s WHERE s.write = p_write AND s.queue IS NOT NULL ORDER BY 1
    ) AS n;
    v_are_new := claim_idempotency_keys(p_write, p_tasks);
    -- The payloads of a chunk are fetched once (that is what `||` is for), after the chunks were put in order.
    INSERT INTO jobs (seq, id, queue_id, type, run_at, created_at, rank, max_attempts, state, headers, payload,
                      codec, timeout_us, max_stalls, backoff_min_us, backoff_max_us, flags, idempotency_key)
    SELECT coalesce(g.seq, nextval('job_seq')), g.id, c.queue_id, g.type, g.run_at, g.created_at, g.rank, g.max_attempts,
           CASE WHEN g.run_at > p_now THEN 0 ELSE 1 END, g.headers, substring(c.payloads FROM g.starts + 1 FOR g.ends - g.starts),
           g.codec, g.timeout_us, g.max_stalls, g.backoff_min, g.backoff_max, g.flags, g.idempotency_key
    FROM (
        SELECT o.*, o.stored || ''::bytea AS payloads, o.ends[:o.jobs] AS starts_each, o.ends[2:] AS ends_each,
               o.types[1] AS type, o.run_ats[1] AS run_at, o.created_ats[1] AS created_at, o.ranks[1] AS rank,
               o.max_attempts[1] AS one_max_attempts, o.headers[1] AS one_header, o.codecs[1] AS codec,
               o.timeouts_us[1] AS timeout_us, o.max_stalls[1] AS one_max_stalls, o.backoff_mins[1] AS backoff_min,
               o.backoff_maxs[1] AS backoff_max, o.flags[1] AS one_flags
        FROM (
            SELECT q.id AS queue_id, s.jobs, s.are_alike, s.ids, s.types, s.run_ats, s.created_ats, s.ranks, s.max_attempts,
                   s.headers, s.codecs, s.timeouts_us, s.max_stalls, s.backoff_mins, s.backoff_maxs, s.flags, s.ends,
                   s.idempotency_keys, s.seqs, s.payloads AS stored, sum(s.jobs) OVER in_order - s.jobs AS jobs_before
            FROM staged AS s JOIN queues AS q ON q.name = s.queue
            WHERE s.write = p_write
            WINDOW in_order AS (ORDER BY array_position(p_tasks, s.task), s.number)
            ORDER BY array_position(p_tasks, s.task), s.number OFFSET 0
        ) AS o OFFSET 0
    ) AS c, LATERAL (
        SELECT * FROM unnest(c.ids, c.types, c.run_ats, c.created_ats, c.ranks, c.max_attempts, c.headers, c.codecs,
                             c.timeouts_us, c.max_stalls, c.backoff_mins, c.backoff_maxs, c.flags, c.starts_each, c.ends_each,
                             c.idempotency_keys, c.seqs)
            AS u(id, type, run_at, created_at, rank, max_attempts, headers, codec, timeout_us,
                 max_stalls, backoff_min, backoff_max, flags, starts, ends, idempotency_key, seq)
        WHERE NOT c.are_alike
        UNION ALL
        SELECT p_id_head || encode(int4send((c.jobs_before + u.place)::integer), 'hex'), c.type, c.run_at, c.created_at, c.rank,
               c.one_max_attempts, c.one_header, c.codec, c.timeout_us, c.one_max_stalls, c.backoff_min, c.backoff_max,
               c.one_flags, u.starts, u.ends, NULL, NULL
        FROM (
            SELECT unnest(c.starts_each) AS starts, unnest(c.ends_each) AS ends, generate_series(1, c.jobs) AS place
        ) AS u
        WHERE c.are_alike
    ) AS g
    WHERE v_are_new OR g.seq IS NULL OR EXISTS (
        SELECT FROM idempotency AS i
        WHERE i.queue_id = c.queue_id AND i.idempotency_key = g.idempotency_key AND i.job_seq = g.seq);
    GET DIAGNOSTICS v_added = ROW_COUNT;
    v_jobs := v_jobs + v_added;
    INSERT INTO moves (queue_id, scheduled, ready, stir, ranks, low_run_at, high_run_at)
    SELECT r.queue_id, sum(r.scheduled), sum(r.ready), p_stir, array_agg(r.rank), min(r.low_run_at), max(r.high_run_at)
    FROM (
        SELECT q.id AS queue_id, g.rank, coalesce(sum(g.jobs) FILTER (WHERE g.run_at > p_now), 0) AS scheduled,
               coalesce(sum(g.jobs) FILTER (WHERE g.run_at <= p_now), 0) AS ready, min(g.run_at) AS low_run_at,
               max(g.run_at) FILTER (WHERE g.run_at <= p_now) AS high_run_at
        FROM staged AS s JOIN queues AS q ON q.name = s.queue,
             LATERAL (
                 SELECT CASE WHEN s.are_alike THEN s.jobs ELSE 1 END AS jobs, u.run_at, u.rank
                 FROM unnest(s.run_ats, s.ranks, s.seqs, s.idempotency_keys) AS u(run_at, rank, seq, key)
                 WHERE v_are_new OR u.seq IS NULL OR EXISTS (
                     SELECT FROM idempotency AS i WHERE i.queue_id = q.id AND i.idempotency_key = u.key AND i.job_seq = u.seq)
             ) AS g
        WHERE s.write = p_write
        GROUP BY q.id, g.rank
    ) AS r GROUP BY r.queue_id;
    PERFORM tell_waiters(n.id, p_stir) FROM (
        SELECT DISTINCT q.id FROM staged AS s JOIN queues AS q ON q.name = s.queue WHERE s.write = p_write
    ) AS n;

    DELETE FROM staged WHERE write = p_write;
    UPDATE published SET jobs = v_jobs WHERE series = p_series;
    PERFORM forget_old_writes();
    RETURN v_jobs;
END $$ SET search_path FROM CURRENT SET jit = off;

-- Forget what was staged. A series goes on: its write may be staged again, under the same name.
CREATE FUNCTION abandon_write(p_write text, p_series text, p_number bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(write_lock(p_write));
    IF p_number < 0 THEN
        INSERT INTO published (series, number) VALUES (p_series, p_number) ON CONFLICT (series) DO NOTHING;
    END IF;
    DELETE FROM staged WHERE write = p_write;
END $$ SET search_path FROM CURRENT;
