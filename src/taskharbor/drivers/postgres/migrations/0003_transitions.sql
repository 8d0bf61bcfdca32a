-- The transitions of one job, in the words of the contract. Whoever calls them holds the row lock of the job.

CREATE FUNCTION state_by_run_at(p_run_at bigint, p_now bigint) RETURNS smallint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_run_at > p_now THEN 0 ELSE 1 END;

-- A row of the log for the job as it was while the lease was held. Returns when it ended.
CREATE FUNCTION log_attempt(
    p_held jobs, p_outcome smallint, p_state smallint, p_now bigint, p_error_type text, p_error_message text
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    -- `now` may have been read before the lease began.
    v_ended_at bigint := greatest(p_now, p_held.reserved_at);
BEGIN
    INSERT INTO attempts (job_id, queue_id, type, key, rank, fence, worker, created_at, run_at, reserved_at,
                          lease_expires_at, ended_at, outcome, state, error_type, error_message, payload_size)
    VALUES (p_held.id, p_held.queue_id, p_held.type, p_held.key, p_held.rank, p_held.fence, p_held.worker,
            p_held.created_at, p_held.run_at, p_held.reserved_at, p_held.expires_at, v_ended_at, p_outcome, p_state,
            p_error_type, p_error_message, octet_length(p_held.payload));
    RETURN v_ended_at;
END $$;

-- The instant until which a lease that ends at p_ended_at was valid; NULL where none was held.
CREATE FUNCTION valid_until(p_held jobs, p_ended_at bigint) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_held.reserved_at IS NOT NULL THEN least(p_ended_at, p_held.expires_at) END;

-- What to tell those who wait when a lease ends: only a queue with a limit has new room.
CREATE FUNCTION stir_by_room(p_queue_id integer, p_stir smallint) RETURNS smallint LANGUAGE sql STABLE
RETURN (SELECT CASE WHEN max_inflight IS NULL THEN 0 ELSE p_stir END FROM queues WHERE id = p_queue_id);

-- Ids made here look like those made by clients: time first, so the index grows at its end.
CREATE FUNCTION new_job_id(p_now bigint) RETURNS text LANGUAGE sql VOLATILE
RETURN (
    SELECT substr(t, 1, 8) || '-' || substr(t, 9, 4) || '-7' || substr(r, 16, 21)
    FROM (SELECT lpad(to_hex(p_now / 1000), 12, '0') AS t, gen_random_uuid()::text AS r) AS parts
);

-- The job that a failure queue receives: the same bytes that `failure_record` makes.
CREATE FUNCTION serve_failure_queue(p_dead jobs, p_now bigint, p_stir smallint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_source queues;
    v_target integer;
BEGIN
    SELECT * INTO v_source FROM queues WHERE id = p_dead.queue_id;
    IF v_source.failure_queue IS NULL THEN
        RETURN;
    END IF;
    v_target := queue_id_of(v_source.failure_queue);
    INSERT INTO jobs (id, type, queue_id, rank, run_at, created_at, max_attempts, state, headers, payload)
    VALUES (new_job_id(p_now), 'taskharbor.failure', v_target, 0, p_now, p_now, 5, 1, p_dead.headers,
            convert_to(concat(
                '{"job_id":', to_json(p_dead.id), ',"queue":', to_json(v_source.name), ',"type":', to_json(p_dead.type),
                ',"codec":', to_json(coalesce(p_dead.codec, 'json')),
                ',"payload":"', translate(encode(p_dead.payload, 'base64'), E'\n', ''),
                '","error":', to_json(coalesce(p_dead.last_error, '')),
                ',"attempts":', p_dead.attempts, ',"stalls":', p_dead.stalls, '}'), 'UTF8'));
    PERFORM note(v_target, NULL, 1::smallint, p_stir, 0::smallint, p_now, NULL);
END $$;

-- The number of a queue; one that was never heard of begins to exist.
CREATE FUNCTION queue_id_of(p_name text) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_id integer;
BEGIN
    SELECT id INTO v_id FROM queues WHERE name = p_name;
    IF v_id IS NULL THEN
        INSERT INTO queues (name, keep_done_us, keep_dead_us, keep_attempts_us)
        VALUES (p_name, 7 * 86400000000, 90 * 86400000000, 30 * 86400000000)
        ON CONFLICT (name) DO NOTHING RETURNING id INTO v_id;
        IF v_id IS NULL THEN
            SELECT id INTO v_id FROM queues WHERE name = p_name;
        END IF;
    END IF;
    RETURN v_id;
END $$;

-- A job's end: done, dead or cancelled. It leaves `jobs`, a blocked job of its key may run, the failure queue is served.
-- p_job carries the final counters and error; it still has the lease that ends.
CREATE FUNCTION end_job(
    p_job jobs, p_state smallint, p_outcome smallint, p_now bigint, p_stir smallint,
    p_error_type text DEFAULT NULL, p_error_message text DEFAULT NULL,
    p_result bytea DEFAULT NULL, p_merged_into text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_ended_at bigint := log_attempt(p_job, p_outcome, p_state, p_now, p_error_type, p_error_message);
    v_freed jobs;
BEGIN
    DELETE FROM jobs WHERE id = p_job.id;
    IF p_state = 5 THEN
        INSERT INTO dead (seq, run_at, created_at, finished_at, failed_at, timeout_us, backoff_min_us, backoff_max_us,
                          fence, queue_id, max_attempts, max_stalls, attempts, stalls, rank, state, flags, id, type, key,
                          codec, headers, idempotency_key, last_error, merged_into, result, payload)
        VALUES (p_job.seq, p_job.run_at, p_job.created_at, v_ended_at, p_job.failed_at, p_job.timeout_us,
                p_job.backoff_min_us, p_job.backoff_max_us, p_job.fence, p_job.queue_id, p_job.max_attempts,
                p_job.max_stalls, p_job.attempts, p_job.stalls, p_job.rank, p_state, p_job.flags, p_job.id, p_job.type,
                p_job.key, p_job.codec, p_job.headers, p_job.idempotency_key, p_job.last_error, p_merged_into, p_result,
                p_job.payload);
    ELSE
        INSERT INTO finished (seq, run_at, created_at, finished_at, failed_at, timeout_us, backoff_min_us, backoff_max_us,
                              fence, queue_id, max_attempts, max_stalls, attempts, stalls, rank, state, flags, id, type, key,
                              codec, headers, idempotency_key, last_error, merged_into, result, payload)
        VALUES (p_job.seq, p_job.run_at, p_job.created_at, v_ended_at, p_job.failed_at, p_job.timeout_us,
                p_job.backoff_min_us, p_job.backoff_max_us, p_job.fence, p_job.queue_id, p_job.max_attempts,
                p_job.max_stalls, p_job.attempts, p_job.stalls, p_job.rank, p_state, p_job.flags, p_job.id, p_job.type,
                p_job.key, p_job.codec, p_job.headers, p_job.idempotency_key, p_job.last_error, p_merged_into, p_result,
                p_job.payload);
    END IF;
    PERFORM note(p_job.queue_id, p_job.state, p_state,
                 CASE WHEN p_job.state = 3 THEN stir_by_room(p_job.queue_id, p_stir) ELSE 0::smallint END,
                 NULL, NULL, valid_until(p_job, v_ended_at));
    IF p_job.state = 3 AND p_job.key IS NOT NULL THEN
        UPDATE jobs SET state = state_by_run_at(run_at, p_now)
        WHERE queue_id = p_job.queue_id AND key = p_job.key AND state = 2
        RETURNING * INTO v_freed;
        IF FOUND THEN
            PERFORM note(v_freed.queue_id, 2::smallint, v_freed.state, p_stir, v_freed.rank, v_freed.run_at, NULL);
        END IF;
    END IF;
    IF p_state = 5 THEN
        PERFORM serve_failure_queue(p_job, p_now, p_stir);
    END IF;
END $$;

-- What one more request with the same key changes in a job.
CREATE FUNCTION changed_by(p_job jobs, p_by jobs, p_flags smallint) RETURNS jobs LANGUAGE plpgsql AS $$
DECLARE
    v_flags smallint := coalesce(p_flags, 1);
    v_when integer := v_flags >> 3;
BEGIN
    IF v_flags & 1 <> 0 THEN
        p_job.type := p_by.type;
        p_job.payload := p_by.payload;
        p_job.codec := p_by.codec;
        p_job.headers := p_by.headers;
        p_job.timeout_us := p_by.timeout_us;
    END IF;
    IF v_when = 1 THEN
        p_job.run_at := p_by.run_at;
    ELSIF v_when = 2 THEN
        p_job.run_at := greatest(p_job.run_at, p_by.run_at);
    ELSIF v_when = 3 THEN
        p_job.run_at := least(p_job.run_at, p_by.run_at);
    END IF;
    IF v_flags & 2 <> 0 THEN
        p_job.max_attempts := p_by.max_attempts;
        p_job.max_stalls := p_by.max_stalls;
        p_job.backoff_min_us := p_by.backoff_min_us;
        p_job.backoff_max_us := p_by.backoff_max_us;
    END IF;
    IF v_flags & 4 <> 0 THEN
        p_job.attempts := 0;
        p_job.stalls := 0;
    END IF;
    RETURN p_job;
END $$;

-- The lease ends, the job does not: it waits again and absorbs a blocked job of its key.
-- p_held is the job as it was leased, p_job as it is to be.
CREATE FUNCTION back_to_waiting(
    p_held jobs, p_job jobs, p_outcome smallint, p_now bigint, p_stir smallint,
    p_error_type text DEFAULT NULL, p_error_message text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_blocked jobs;
    v_ended_at bigint;
BEGIN
    IF p_held.key IS NOT NULL THEN
        SELECT * INTO v_blocked FROM jobs
        WHERE queue_id = p_held.queue_id AND key = p_held.key AND state = 2 FOR UPDATE;
        IF FOUND THEN
            p_job := changed_by(p_job, v_blocked, v_blocked.flags);
        END IF;
    END IF;
    p_job.state := state_by_run_at(p_job.run_at, p_now);
    v_ended_at := log_attempt(p_held, p_outcome, p_job.state, p_now, p_error_type, p_error_message);
    IF v_blocked.seq IS NOT NULL THEN
        PERFORM end_job(v_blocked, 6::smallint, 6::smallint, p_now, p_stir, p_merged_into => p_job.id);
    END IF;
    UPDATE jobs SET
        state = p_job.state, run_at = p_job.run_at, type = p_job.type, payload = p_job.payload, codec = p_job.codec,
        headers = p_job.headers, timeout_us = p_job.timeout_us, max_attempts = p_job.max_attempts,
        max_stalls = p_job.max_stalls, backoff_min_us = p_job.backoff_min_us, backoff_max_us = p_job.backoff_max_us,
        attempts = p_job.attempts, stalls = p_job.stalls, last_error = p_job.last_error, failed_at = p_job.failed_at,
        token = NULL, worker = NULL, reserved_at = NULL, expires_at = NULL, progress = NULL, cancel_requested = false
    WHERE id = p_job.id;
    PERFORM note(p_job.queue_id, 3::smallint, p_job.state, p_stir, p_job.rank, p_job.run_at,
                 valid_until(p_held, v_ended_at));
END $$;

-- A lease that is over: the job goes back to its place, or ends where it has stalled too often.
CREATE FUNCTION expire(p_held jobs, p_now bigint, p_stir smallint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_job jobs := p_held;
    v_type CONSTANT text := 'LeaseExpired';
    v_message CONSTANT text := 'the lease expired before the job was settled (worker lost or stalled)';
BEGIN
    v_job.stalls := v_job.stalls + 1;
    IF v_job.cancel_requested THEN
        PERFORM end_job(v_job, 6::smallint, 3::smallint, p_now, p_stir, v_type, v_message);
    ELSIF v_job.attempts + v_job.stalls >= v_job.max_attempts OR v_job.stalls >= v_job.max_stalls THEN
        v_job.last_error := v_type || ': ' || v_message;
        PERFORM end_job(v_job, 5::smallint, 3::smallint, p_now, p_stir, v_type, v_message);
    ELSE
        PERFORM back_to_waiting(p_held, v_job, 3::smallint, p_now, p_stir, v_type, v_message);
    END IF;
END $$;

-- End up to p_limit leases of a queue that are over, from p_low on. Skips what somebody else is working on.
CREATE FUNCTION reclaim_queue(p_queue_id integer, p_low bigint, p_now bigint, p_limit integer, p_stir smallint)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_job jobs;
    v_ended integer := 0;
BEGIN
    FOR v_job IN
        SELECT * FROM jobs
        WHERE queue_id = p_queue_id AND state = 3 AND coalesce(expires_at, run_at) BETWEEN p_low AND p_now
        ORDER BY coalesce(expires_at, run_at) LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM expire(v_job, p_now, p_stir);
        v_ended := v_ended + 1;
    END LOOP;
    RETURN v_ended;
END $$;
