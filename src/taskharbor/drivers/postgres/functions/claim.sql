-- Claim jobs, in one transaction. Rows that another call has locked are skipped. One index walk per rank.
--
-- A claim walks an index from its front. In a busy queue the dead entries are at the front: those of jobs claimed before, which
-- nobody may remove while some transaction holds an old snapshot. So a claimer keeps a hint, which only this function and `watch`
-- read. The hint says where the waiting jobs begin (per rank the place of the first waiting job, and the earliest expiry of a
-- lease), and in which snapshot that was true. A job that came before these places later was written by a transaction that this
-- snapshot does not show. Every such transaction has left a row in `moves`. So the hint is exact, not a guess. Without a hint, or
-- if moves that it has not seen may have been folded, the claim looks from the beginning.
--
-- Returns the jobs, and at last a row without a number: its id is the hint for the next claim of the same queue and types.
CREATE OR REPLACE FUNCTION claim(
    p_queue text, p_types text[], p_limit integer, p_lease_for bigint, p_now bigint, p_worker text, p_secret text,
    p_try integer, p_stir integer, p_hint claim_hint
) RETURNS SETOF jobs LANGUAGE plpgsql AS $$
DECLARE
    -- Short claims that one look serves. Finding the first waiting job would cost as much as the rest of such a claim.
    c_uses CONSTANT integer := 16;
    -- Queues with more ranks get no hint.
    c_ranks CONSTANT integer := 64;
    v_queue record;
    v_limited boolean := false;
    v_lock text;
    v_knows boolean;
    v_first record;
    v_got record;
    v_room integer;
    v_places tid[];
    v_scheduled integer := 0;
    v_next claim_hint := p_hint;
    v_row jobs;
BEGIN
    IF p_hint.queue_id IS NULL THEN
        SELECT id, max_inflight INTO v_queue FROM queues WHERE name = p_queue;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        v_next.queue_id := v_queue.id;
        v_limited := v_queue.max_inflight IS NOT NULL;
    END IF;
    -- Assignments, not PERFORM: an expression costs a tenth of a statement.
    v_lock := pg_advisory_xact_lock_shared(queue_lock(v_next.queue_id));
    -- Another number: two claims that hold the shared lock when they find a new limit must not both ask for it alone.
    v_lock := CASE WHEN v_limited THEN pg_advisory_xact_lock(queue_lock(-1000 - v_next.queue_id))::text END;
    -- No other call has this secret, but another try of this call may still be running, or begin late, because its answer was
    -- lost. The lock makes them run one after the other. After the latest try, no earlier one does anything.
    v_lock := pg_advisory_xact_lock(hashtextextended(p_secret, 0));
    -- Before anything is read: changes that commit from here on are not seen, and the next claim looks at them.
    v_next.seen := pg_current_snapshot();
    -- Under the lock, so the settings do not change until this claim is over. In one statement, because a folding in between
    -- would remove moves that were not read yet. Values that can be computed here are: a separate expression costs more.
    SELECT q.id, q.max_inflight, CASE WHEN q.paused THEN 0 ELSE p_limit END AS room, new.low_run_at, new.ranks,
           EXISTS (SELECT FROM repeated WHERE call = p_secret AND try > p_try) AS is_outdated,
           p_hint.seen IS NOT NULL AND NOT coalesce(new.is_folded, false) AS is_known,
           coalesce(new.ranks <@ p_hint.ranks AND new.low_run_at > ALL (p_hint.run_ats), new.ranks IS NULL) AS is_in_place,
           greatest(p_hint.floor, new.latest_end) AS floor,
           least(p_hint.low_expiry, new.low_expires_at) AS low_expiry
    INTO v_queue
    FROM queues AS q
    CROSS JOIN LATERAL (
        SELECT max(m.latest_end) AS latest_end, min(m.low_run_at) AS low_run_at, min(m.low_expires_at) AS low_expires_at,
               bool_or(m.folded > pg_snapshot_xmin(p_hint.seen)) AS is_folded,
               array_agg(DISTINCT r.rank) FILTER (WHERE r.rank IS NOT NULL) AS ranks
        FROM moves AS m LEFT JOIN LATERAL unnest(m.ranks) AS r(rank) ON true
        WHERE m.queue_id = q.id
          AND m.xid >= coalesce(pg_snapshot_xmin(p_hint.seen), '0'::xid8)
          AND (p_hint.seen IS NULL OR NOT pg_visible_in_snapshot(m.xid, p_hint.seen))
    ) AS new
    WHERE q.id = v_next.queue_id AND q.name = p_queue;
    IF v_queue.max_inflight IS NOT NULL AND NOT v_limited OR NOT FOUND THEN
        -- The limit is new, or the claimer's hint is of another queue: look from the beginning.
        RETURN QUERY SELECT * FROM claim(p_queue, p_types, p_limit, p_lease_for, p_now, p_worker, p_secret, p_try, p_stir, NULL);
        RETURN;
    END IF;
    IF v_queue.is_outdated THEN
        RETURN;
    END IF;
    IF p_try > 0 THEN
        INSERT INTO repeated AS r (call, try) VALUES (p_secret, p_try)
        ON CONFLICT (call) DO UPDATE SET try = excluded.try;
        -- If it took effect, these are its jobs, and their lease counts from now. Jobs beyond the present limit go back.
        PERFORM settle_one(c.id, c.seq, p_secret, '{"type": "release"}', p_now, p_stir, false)
        FROM (SELECT j.id, j.seq FROM jobs AS j
              WHERE j.queue_id = v_queue.id AND j.state = 3 AND coalesce(j.expires_at, j.run_at) > p_now AND j.token = p_secret
              ORDER BY j.rank, j.run_at, j.seq OFFSET p_limit) AS c;
        RETURN QUERY
        UPDATE jobs AS j SET expires_at = greatest(j.expires_at, p_now + p_lease_for)
        WHERE j.ctid = ANY (ARRAY(
            SELECT c.ctid FROM jobs AS c
            WHERE c.queue_id = v_queue.id AND c.state = 3 AND coalesce(c.expires_at, c.run_at) > p_now AND c.token = p_secret
            FOR UPDATE))
        RETURNING j.*;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;

    v_knows := v_queue.is_known;
    v_next.floor := v_queue.floor;
    v_next.low_expiry := CASE WHEN v_knows THEN v_queue.low_expiry ELSE -1 END;
    IF v_knows AND NOT v_queue.is_in_place THEN
        -- A job began to wait before a known place, or with an unknown rank.
        SELECT array_agg(h.rank ORDER BY h.rank), array_agg(h.run_at ORDER BY h.rank), array_agg(h.seq ORDER BY h.rank)
        INTO v_next.ranks, v_next.run_ats, v_next.seqs
        FROM (
            SELECT rank, least(known.run_at, v_queue.low_run_at) AS run_at,
                   CASE WHEN known.run_at < v_queue.low_run_at THEN known.seq ELSE 0 END AS seq
            FROM unnest(p_hint.ranks, p_hint.run_ats, p_hint.seqs) AS known(rank, run_at, seq)
                FULL JOIN unnest(v_queue.ranks) AS new(rank) USING (rank)
        ) AS h;
    END IF;
    IF v_next.low_expiry <= p_now AND reclaim(p_queue, v_next.low_expiry, p_now, greatest(p_limit, 1000), p_stir) > 0 THEN
        -- Reclaimed jobs can be at any place.
        v_knows := false;
    END IF;
    IF NOT v_knows THEN
        v_next.floor := greatest(v_next.floor, (SELECT max(m.latest_end) FROM moves AS m WHERE m.queue_id = v_queue.id));
        v_next.ranks := waiting_ranks(v_queue.id);
        v_next.run_ats := array_fill((-9223372036854775808)::bigint, ARRAY[cardinality(v_next.ranks)]);
        v_next.seqs := array_fill(0::bigint, ARRAY[cardinality(v_next.ranks)]);
    END IF;

    v_room := v_queue.room;
    IF v_queue.max_inflight IS NOT NULL THEN
        SELECT least(v_room, v_queue.max_inflight - count(*)) INTO v_room FROM (
            -- All expired leases without a row lock are reclaimed. An expired lease with a lock counts: a heartbeat that is under
            -- way may have begun in time, and make it valid again.
            SELECT FROM jobs AS j WHERE j.queue_id = v_queue.id AND j.state = 3
            LIMIT v_queue.max_inflight
        ) AS leased;
    END IF;
    FOR i IN 1 .. coalesce(cardinality(v_next.ranks), 0) LOOP
        EXIT WHEN v_room < 1;
        IF p_types IS NULL THEN
            SELECT array_agg(picked.place) AS places, count(*) AS jobs, count(*) FILTER (WHERE picked.state = 0) AS scheduled
            INTO v_got
            FROM (
                SELECT c.ctid AS place, c.state FROM jobs AS c
                WHERE c.queue_id = v_queue.id AND c.rank = v_next.ranks[i] AND c.state <= 1
                  AND (c.run_at, c.seq) >= (v_next.run_ats[i], v_next.seqs[i]) AND c.run_at <= p_now
                ORDER BY c.run_at, c.seq LIMIT v_room FOR UPDATE SKIP LOCKED
            ) AS picked;
            v_places := v_places || v_got.places;
            v_room := v_room - v_got.jobs;
            v_scheduled := v_scheduled + v_got.scheduled;
            CONTINUE;
        END IF;
        SELECT * INTO v_first
        FROM first_of_types(v_queue.id, v_next.ranks[i], v_next.run_ats[i], v_next.seqs[i], p_types, v_room, p_now);
        -- Of these types, no job waits before the first that is found: the next claim begins there.
        v_next.run_ats[i] := coalesce(v_first.run_at, v_next.run_ats[i]);
        v_next.seqs[i] := coalesce(v_first.seq, v_next.seqs[i]);
        LOOP
            SELECT array_agg(picked.place) AS places, count(*) AS jobs, count(*) FILTER (WHERE picked.state = 0) AS scheduled
            INTO v_got
            FROM (
                SELECT c.ctid AS place, c.state
                FROM unnest(v_first.places, v_first.types) WITH ORDINALITY AS found(place, type, n)
                JOIN jobs AS c ON c.ctid = found.place
                WHERE c.state <= 1 AND c.rank = v_next.ranks[i] AND c.run_at <= p_now AND c.type = found.type
                ORDER BY found.n FOR UPDATE OF c SKIP LOCKED
            ) AS picked;
            v_places := v_places || v_got.places;
            v_room := v_room - v_got.jobs;
            v_scheduled := v_scheduled + v_got.scheduled;
            EXIT WHEN v_room < 1 OR v_first.last_seq IS NULL;
            -- Others hold some of them: there may be more further on.
            SELECT * INTO v_first
            FROM first_of_types(v_queue.id, v_next.ranks[i], v_first.last_run_at, v_first.last_seq + 1, p_types, v_room, p_now);
        END LOOP;
    END LOOP;
    IF v_places IS NOT NULL THEN
        RETURN QUERY
        -- The rows are locked, so all earlier ends can be seen now. `now` may have been read before such an end: the log must not
        -- show the two leases at once.
        WITH begin AS MATERIALIZED (
            SELECT greatest(p_now, v_next.floor, max(m.latest_end)) AS at FROM moves AS m
            WHERE m.queue_id = v_queue.id
              AND m.xid >= pg_snapshot_xmin(v_next.seen) AND NOT pg_visible_in_snapshot(m.xid, v_next.seen)
        ), noted AS (
            INSERT INTO moves (queue_id, scheduled, ready, inflight, low_expires_at)
            SELECT v_queue.id, -v_scheduled, v_scheduled - cardinality(v_places), cardinality(v_places), begin.at + p_lease_for
            FROM begin
        )
        UPDATE jobs AS j SET state = 3, token = p_secret, worker = p_worker, reserved_at = begin.at,
                             expires_at = begin.at + p_lease_for, fence = j.fence + 1
        FROM begin WHERE j.ctid = ANY (v_places)
        RETURNING j.*;
    END IF;

    IF v_queue.is_known AND v_room > 0 AND v_next.uses < c_uses AND NOT coalesce(v_next.low_expiry <= p_now, false) THEN
        -- The places still hold, and few entries have died since. Finding the first waiting job again would cost more.
        v_next.uses := v_next.uses + 1;
    ELSIF coalesce(cardinality(v_next.ranks), 0) <= c_ranks THEN
        v_next.uses := 0;
        v_next.low_expiry := (
            SELECT j.expires_at FROM jobs AS j
            WHERE j.queue_id = v_queue.id AND j.state = 3
              AND coalesce(j.expires_at, j.run_at) >= least(v_next.low_expiry, p_now + p_lease_for)
            ORDER BY coalesce(j.expires_at, j.run_at) LIMIT 1);
        SELECT coalesce(array_agg(h.rank), '{}'), coalesce(array_agg(head.run_at), '{}'), coalesce(array_agg(head.seq), '{}')
        INTO v_next.ranks, v_next.run_ats, v_next.seqs
        FROM unnest(v_next.ranks, v_next.run_ats, v_next.seqs) AS h(rank, run_at, seq),
             LATERAL (SELECT c.run_at, c.seq FROM jobs AS c
                      WHERE c.queue_id = v_queue.id AND c.rank = h.rank AND c.state <= 1
                        AND (c.run_at, c.seq) >= (h.run_at, h.seq)
                      ORDER BY c.run_at, c.seq LIMIT 1) AS head;
    ELSE
        RETURN;
    END IF;
    -- A limit is looked up every time.
    v_next.queue_id := CASE WHEN v_queue.max_inflight IS NULL THEN v_queue.id END;
    v_row.id := v_next::text;
    RETURN NEXT v_row;
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off
   SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan;
