-- Enqueue the job for a failure queue, with the same bytes that `failure_record` makes.
CREATE OR REPLACE FUNCTION serve_failure_queue(p_dead jobs, p_now bigint, p_stir integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_source queues;
    -- An id in the form of the clients' ids: time first, so the index grows at its end.
    v_id text := overlay(gen_random_uuid()::text PLACING
        regexp_replace(lpad(to_hex(p_now / 1000), 12, '0'), '(.{8})(.{4})', '\1-\2-7') FROM 1);
    v_job jobs;
BEGIN
    SELECT * INTO v_source FROM queues WHERE id = p_dead.queue_id;
    IF v_source.failure_queue IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO jobs (id, type, queue_id, rank, run_at, created_at, max_attempts, state, headers, payload)
    VALUES (v_id, 'taskharbor.failure', queue_id_of(v_source.failure_queue), 0, p_now, p_now, 100, 1, p_dead.headers,
            convert_to(concat(
                '{"job_id":', to_json(p_dead.id), ',"queue":', to_json(v_source.name), ',"type":', to_json(p_dead.type),
                ',"codec":', to_json(coalesce(p_dead.codec, 'json')),
                ',"payload":"', translate(encode(p_dead.payload, 'base64'), E'\n', ''),
                '","error":', to_json(coalesce(p_dead.last_error, '')),
                ',"attempts":', p_dead.attempts, ',"stalls":', p_dead.stalls,
                ',"key":', coalesce(to_json(p_dead.key)::text, 'null'), '}'), 'UTF8'))
    RETURNING * INTO v_job;
    PERFORM note(NULL, v_job, p_stir);
END $$;
