-- Claiming jobs. One transaction, row locks that are skipped where somebody else holds them, one index walk per rank.
--
-- A claim walks an index from its front, and the front of a busy queue is where the dead entries are: those of jobs claimed
-- before, which nobody may remove while some transaction holds an old snapshot. So a claimer keeps in its own memory where
-- the living begin (per rank the place of the first waiting job, the earliest expiry of a lease) and the snapshot in which
-- that was true (p_seen). Whatever came to stand before these places afterwards came by a transaction that this snapshot does
-- not show, and every such transaction has left a row in `moves`. Thus the hint is exact, not a guess; and without one, or
-- when moves that it has not seen may have been folded, everything is looked at from the beginning.

-- The ranks of a queue's waiting jobs, found by one seek each.
CREATE FUNCTION waiting_ranks(p_queue_id integer) RETURNS smallint[] LANGUAGE sql STABLE
RETURN (
        WITH RECURSIVE r(rank) AS (
            (SELECT j.rank FROM jobs AS j WHERE j.queue_id = p_queue_id AND j.state <= 1
             ORDER BY j.rank, j.run_at, j.seq LIMIT 1)
            UNION ALL
            SELECT (SELECT j.rank FROM jobs AS j WHERE j.queue_id = p_queue_id AND j.state <= 1 AND j.rank > r.rank
                    ORDER BY j.rank, j.run_at, j.seq LIMIT 1)
            FROM r WHERE r.rank IS NOT NULL
        )
        SELECT coalesce(array_agg(r.rank), '{}') FROM r WHERE r.rank IS NOT NULL
);

-- Where the first waiting jobs of several types lie, in claim order, from a place on: one rank of a queue. Each type has a
-- line of its own. A portion of every line is read, and more of a line as long as all that was read of it is among the first.
-- Runs with the settings of `reserve`.
CREATE FUNCTION first_of_types(
    p_queue_id integer, p_rank smallint, p_run_at bigint, p_seq bigint, p_types text[], p_limit integer, p_now bigint,
    OUT places tid[], OUT types text[], OUT run_at bigint, OUT seq bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_types text[] := p_types;
    v_portions integer[] := array_fill(p_limit / greatest(1, cardinality(p_types)) + 1, ARRAY[cardinality(p_types)]);
    v_is_cut boolean := true;
BEGIN
    WHILE v_is_cut LOOP
        WITH chosen AS MATERIALIZED (
            SELECT line.type, line.portion, first.place, first.run_at, first.seq
            FROM unnest(v_types, v_portions) AS line(type, portion)
            CROSS JOIN LATERAL (
                SELECT c.ctid AS place, c.run_at, c.seq FROM jobs AS c
                -- Bounds instead of `type = `: no other index gives this order, whatever the planner knows of the types.
                WHERE c.queue_id = p_queue_id AND c.state <= 1
                  AND (c.type, c.rank, c.run_at, c.seq) >= (line.type, p_rank, p_run_at, p_seq)
                  AND (c.type, c.rank, c.run_at) <= (line.type, p_rank, p_now)
                ORDER BY c.type, c.rank, c.run_at, c.seq LIMIT line.portion
            ) AS first
            ORDER BY first.run_at, first.seq LIMIT p_limit
        )
        SELECT (SELECT array_agg(chosen.place) FROM chosen), (SELECT array_agg(chosen.type) FROM chosen),
               (SELECT chosen.run_at FROM chosen LIMIT 1), (SELECT chosen.seq FROM chosen LIMIT 1), array_agg(lines.type),
               array_agg(CASE WHEN lines.taken = lines.portion THEN lines.portion * 4 ELSE lines.taken + 1 END),
               bool_or(lines.taken = lines.portion)
        INTO places, types, run_at, seq, v_types, v_portions, v_is_cut
        FROM (SELECT type, portion, count(*)::integer AS taken FROM chosen GROUP BY type, portion) AS lines;
    END LOOP;
END $$;

CREATE FUNCTION reserve(
    p_queue text, p_types text[], p_limit integer, p_lease_for bigint, p_now bigint, p_worker text, p_secret text,
    p_try integer, p_stir smallint,
    p_queue_id integer, p_seen pg_snapshot, p_floor bigint, p_low_expiry bigint, p_ranks smallint[], p_run_ats bigint[],
    p_seqs bigint[], p_renew boolean
) RETURNS TABLE (
    hint text, seq bigint, rank smallint, run_at bigint, id text, type text, payload bytea, created_at bigint,
    max_attempts integer, fence bigint, reserved_at bigint, expires_at bigint, key text, attempts integer, stalls integer,
    max_stalls integer, codec text, headers text, timeout_us bigint, flags smallint, idempotency_key text,
    backoff_min_us bigint, backoff_max_us bigint, last_error text, failed_at bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_queue record;
    v_queue_id integer := p_queue_id;
    v_is_limited boolean := false;
    v_lock text;
    v_seen pg_snapshot := p_seen;
    v_seen_now pg_snapshot;
    v_ranks smallint[] := p_ranks;
    v_run_ats bigint[] := p_run_ats;
    v_seqs bigint[] := p_seqs;
    v_low_expiry bigint := -1;
    v_floor bigint;
    v_room integer;
    v_got integer;
    v_scheduled integer;
    v_wanted integer;
    v_first record;
    v_picked tid[];
    v_places tid[];
    v_scheduled_taken integer := 0;
BEGIN
    IF p_queue_id IS NULL THEN
        SELECT id, max_inflight INTO v_queue FROM queues WHERE name = p_queue;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        v_queue_id := v_queue.id;
        v_is_limited := v_queue.max_inflight IS NOT NULL;
    END IF;
    -- Assignments, not PERFORM: an expression costs a tenth of a statement.
    IF v_is_limited THEN
        v_lock := pg_advisory_xact_lock(queue_lock(v_queue_id));
    ELSE
        v_lock := pg_advisory_xact_lock_shared(queue_lock(v_queue_id));
    END IF;
    -- Nobody else has this secret, but another try of this very call may still be at work, or begin late: its answer was
    -- lost. One after the other, and after the latest try no earlier one does anything.
    v_lock := pg_advisory_xact_lock(hashtextextended(p_secret, 0));
    -- Before anything is read: what commits from here on is not seen, and will be looked at next time.
    v_seen_now := pg_current_snapshot();
    -- Under the lock: the settings do not change until this claim is over. And in one statement: a folding in between would
    -- take away moves that were not read yet. What can be worked out here is: an expression of its own costs more.
    SELECT q.id, q.max_inflight, CASE WHEN q.paused THEN 0 ELSE p_limit END AS room, new.low_run_at, new.has_known_ranks,
           EXISTS (SELECT FROM repeated WHERE call = p_secret AND try > p_try) AS is_outdated,
           v_seen IS NOT NULL AND NOT coalesce(t.folded > pg_snapshot_xmin(v_seen), false) AS holds,
           coalesce(new.has_known_ranks AND new.low_run_at > ALL (v_run_ats), true) AS holds_in_place,
           greatest(p_floor, t.latest_end, new.latest_end) AS floor, least(p_low_expiry, new.low_expires_at) AS low_expiry
    INTO v_queue
    FROM queues AS q
    LEFT JOIN totals AS t ON t.queue_id = q.id
    CROSS JOIN LATERAL (
        SELECT max(m.latest_end) AS latest_end, min(m.low_run_at) AS low_run_at, min(m.low_expires_at) AS low_expires_at,
               bool_and(m.ranks <@ v_ranks) AS has_known_ranks
        FROM moves AS m
        WHERE m.queue_id = q.id
          AND m.xid >= coalesce(pg_snapshot_xmin(v_seen), '0'::xid8)
          AND (v_seen IS NULL OR NOT pg_visible_in_snapshot(m.xid, v_seen))
    ) AS new
    WHERE q.id = v_queue_id AND q.name = p_queue;
    IF v_queue.max_inflight IS NOT NULL AND NOT v_is_limited OR NOT FOUND THEN
        -- The limit is new, or the claimer remembers another queue: from the beginning, with all that this takes.
        RETURN QUERY SELECT * FROM reserve(p_queue, p_types, p_limit, p_lease_for, p_now, p_worker, p_secret, p_try, p_stir,
                                           NULL, NULL, NULL, NULL, NULL, NULL, NULL, true);
        RETURN;
    END IF;
    IF v_queue.is_outdated THEN
        RETURN;
    END IF;
    IF p_try > 0 THEN
        INSERT INTO repeated AS r (call, try) VALUES (p_secret, p_try)
        ON CONFLICT (call) DO UPDATE SET try = excluded.try;
        -- If it took effect, these are its jobs, and their lease counts from now. More than is asked for now goes back.
        PERFORM settle_one(c.id, c.seq, p_secret, 3::smallint, p_now, p_stir, NULL, NULL, NULL, NULL, NULL, NULL, false)
        FROM (SELECT j.id, j.seq FROM jobs AS j
              WHERE j.queue_id = v_queue.id AND j.state = 3 AND coalesce(j.expires_at, j.run_at) > p_now AND j.token = p_secret
              ORDER BY j.rank, j.run_at, j.seq OFFSET p_limit) AS c;
        RETURN QUERY
        UPDATE jobs AS j SET expires_at = greatest(j.expires_at, p_now + p_lease_for)
        WHERE j.ctid = ANY (ARRAY(
            SELECT c.ctid FROM jobs AS c
            WHERE c.queue_id = v_queue.id AND c.state = 3 AND coalesce(c.expires_at, c.run_at) > p_now AND c.token = p_secret
            FOR UPDATE))
        RETURNING NULL::text, j.seq, j.rank, j.run_at, j.id, j.type, j.payload, j.created_at, j.max_attempts, j.fence,
            j.reserved_at, j.expires_at, j.key, j.attempts, j.stalls, j.max_stalls, j.codec, j.headers, j.timeout_us, j.flags,
            j.idempotency_key, j.backoff_min_us, j.backoff_max_us, j.last_error, j.failed_at;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;

    v_floor := v_queue.floor;
    IF v_queue.holds THEN
        v_low_expiry := v_queue.low_expiry;
        IF v_queue.holds_in_place THEN
        ELSIF v_queue.has_known_ranks THEN
            FOR i IN 1 .. cardinality(v_ranks) LOOP
                IF v_queue.low_run_at <= v_run_ats[i] THEN
                    v_run_ats[i] := v_queue.low_run_at;
                    v_seqs[i] := 0;
                END IF;
            END LOOP;
        ELSE
            SELECT array_agg(h.rank), array_agg(h.run_at), array_agg(h.seq) INTO v_ranks, v_run_ats, v_seqs
            FROM (
                SELECT DISTINCT ON (places.rank) places.rank, places.run_at, places.seq
                FROM (
                    SELECT * FROM unnest(v_ranks, v_run_ats, v_seqs) AS known(rank, run_at, seq)
                    UNION ALL
                    SELECT unnest(v_ranks), v_queue.low_run_at, 0
                    UNION ALL
                    SELECT unnest(m.ranks), v_queue.low_run_at, 0 FROM moves AS m
                    WHERE m.queue_id = v_queue.id
                      AND m.xid >= pg_snapshot_xmin(v_seen) AND NOT pg_visible_in_snapshot(m.xid, v_seen)
                ) AS places
                ORDER BY places.rank, places.run_at, places.seq
            ) AS h;
            IF (SELECT t.folded > pg_snapshot_xmin(v_seen) FROM totals AS t WHERE t.queue_id = v_queue.id) THEN
                -- A folding came between the two readings and may have taken ranks with it.
                v_ranks := waiting_ranks(v_queue.id);
                v_run_ats := array_fill((-9223372036854775808)::bigint, ARRAY[cardinality(v_ranks)]);
                v_seqs := array_fill(0::bigint, ARRAY[cardinality(v_ranks)]);
            END IF;
        END IF;
    ELSE
        v_floor := greatest(v_floor, (SELECT max(m.latest_end) FROM moves AS m WHERE m.queue_id = v_queue.id));
        v_ranks := waiting_ranks(v_queue.id);
        v_run_ats := array_fill((-9223372036854775808)::bigint, ARRAY[cardinality(v_ranks)]);
        v_seqs := array_fill(0::bigint, ARRAY[cardinality(v_ranks)]);
    END IF;

    IF v_low_expiry <= p_now AND reclaim_queue(v_queue.id, v_low_expiry, p_now, 1000, p_stir) > 0 THEN
        -- What was reclaimed stands anywhere, and its end counts.
        v_floor := greatest(v_floor, (SELECT max(m.latest_end) FROM moves AS m WHERE m.queue_id = v_queue.id));
        v_ranks := waiting_ranks(v_queue.id);
        v_run_ats := array_fill((-9223372036854775808)::bigint, ARRAY[cardinality(v_ranks)]);
        v_seqs := array_fill(0::bigint, ARRAY[cardinality(v_ranks)]);
    END IF;

    v_room := v_queue.room;
    IF v_is_limited AND v_queue.max_inflight IS NOT NULL THEN
        SELECT least(v_room, v_queue.max_inflight - count(*)) INTO v_room FROM (
            -- Whatever is over and free has been reclaimed. What is over and busy counts: a heartbeat that is under way may
            -- have begun in time, and make it valid again.
            SELECT FROM jobs AS j WHERE j.queue_id = v_queue.id AND j.state = 3
            LIMIT v_queue.max_inflight
        ) AS leased;
    END IF;
    FOR i IN 1 .. coalesce(cardinality(v_ranks), 0) LOOP
        EXIT WHEN v_room < 1;
        IF p_types IS NULL THEN
            SELECT array_agg(picked.place), count(*), count(*) FILTER (WHERE picked.state = 0)
            INTO v_picked, v_got, v_scheduled
            FROM (
                SELECT c.ctid AS place, c.state FROM jobs AS c
                WHERE c.queue_id = v_queue.id AND c.rank = v_ranks[i] AND c.state <= 1
                  AND (c.run_at, c.seq) >= (v_run_ats[i], v_seqs[i]) AND c.run_at <= p_now
                ORDER BY c.run_at, c.seq LIMIT v_room FOR UPDATE SKIP LOCKED
            ) AS picked;
        ELSE
            v_wanted := v_room;
            LOOP
                SELECT * INTO v_first
                FROM first_of_types(v_queue.id, v_ranks[i], v_run_ats[i], v_seqs[i], p_types, v_wanted, p_now);
                -- Of these types, none lives before the first that is found: the claimer's next claim begins there.
                v_run_ats[i] := coalesce(v_first.run_at, v_run_ats[i]);
                v_seqs[i] := coalesce(v_first.seq, v_seqs[i]);
                SELECT array_agg(picked.place), count(*), count(*) FILTER (WHERE picked.state = 0)
                INTO v_picked, v_got, v_scheduled
                FROM (
                    SELECT c.ctid AS place, c.state
                    FROM unnest(v_first.places, v_first.types) WITH ORDINALITY AS found(place, type, n)
                    JOIN jobs AS c ON c.ctid = found.place
                    WHERE c.state <= 1 AND c.run_at <= p_now AND c.type = found.type
                    ORDER BY found.n LIMIT v_room FOR UPDATE OF c SKIP LOCKED
                ) AS picked;
                EXIT WHEN v_got = v_room OR coalesce(cardinality(v_first.places), 0) < v_wanted;
                -- Others hold some of them: further on there may be more.
                v_wanted := v_wanted * 4;
            END LOOP;
        END IF;
        v_places := v_places || v_picked;
        v_room := v_room - v_got;
        v_scheduled_taken := v_scheduled_taken + v_scheduled;
    END LOOP;
    IF v_places IS NOT NULL THEN
        RETURN QUERY
        -- The rows are locked, so whatever ended before can be seen now. `now` may have been read before that end: the log
        -- must not show one lease beside the other.
        WITH begin AS MATERIALIZED (
            SELECT greatest(p_now, v_floor, max(m.latest_end)) AS at FROM moves AS m
            WHERE m.queue_id = v_queue.id
              AND m.xid >= pg_snapshot_xmin(v_seen_now) AND NOT pg_visible_in_snapshot(m.xid, v_seen_now)
        ), noted AS (
            INSERT INTO moves (queue_id, scheduled, ready, inflight, low_expires_at)
            SELECT v_queue.id, -v_scheduled_taken, v_scheduled_taken - cardinality(v_places), cardinality(v_places),
                   begin.at + p_lease_for
            FROM begin
        )
        UPDATE jobs AS j SET state = 3, token = p_secret, worker = p_worker, reserved_at = begin.at,
                             expires_at = begin.at + p_lease_for, fence = j.fence + 1
        FROM begin WHERE j.ctid = ANY (v_places)
        RETURNING NULL::text, j.seq, j.rank, j.run_at, j.id, j.type, j.payload, j.created_at, j.max_attempts, j.fence,
            j.reserved_at, j.expires_at, j.key, j.attempts, j.stalls, j.max_stalls, j.codec, j.headers, j.timeout_us, j.flags,
            j.idempotency_key, j.backoff_min_us, j.backoff_max_us, j.last_error, j.failed_at;
    END IF;

    -- What to remember: see above. Text that the claimer hands back as it is.
    IF v_queue.holds AND v_room > 0 AND NOT p_renew AND NOT coalesce(v_low_expiry <= p_now, false) THEN
        -- The places still hold, as of now, and few have died since: to look where the living begin would cost more.
        hint := concat(CASE WHEN NOT v_is_limited THEN v_queue.id END, '/', v_seen_now, '/', v_floor, '/', v_low_expiry, '/',
                       v_ranks, '/', v_run_ats, '/', v_seqs);
        seq := NULL;
        RETURN NEXT;
    ELSIF coalesce(cardinality(v_ranks), 0) <= 64 THEN
        -- Where the living begin now, in one snapshot with the snapshot itself.
        hint := (
            SELECT concat(
                CASE WHEN v_queue.max_inflight IS NULL THEN v_queue.id END, '/', v_seen_now, '/', v_floor, '/',
                (SELECT j.expires_at FROM jobs AS j
                 WHERE j.queue_id = v_queue.id AND j.state = 3
                   AND coalesce(j.expires_at, j.run_at) >= least(v_low_expiry, p_now + p_lease_for)
                 ORDER BY coalesce(j.expires_at, j.run_at) LIMIT 1),
                '/', coalesce(array_agg(h.rank), '{}'), '/', coalesce(array_agg(head.run_at), '{}'), '/',
                coalesce(array_agg(head.seq), '{}'), '/')
            FROM unnest(v_ranks, v_run_ats, v_seqs) AS h(rank, run_at, seq),
                 LATERAL (SELECT c.run_at, c.seq FROM jobs AS c
                          WHERE c.queue_id = v_queue.id AND c.rank = h.rank AND c.state <= 1
                            AND (c.run_at, c.seq) >= (h.run_at, h.seq)
                          ORDER BY c.run_at, c.seq LIMIT 1) AS head);
        seq := NULL;
        RETURN NEXT;
    END IF;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
   SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan;
