-- A row of the log for the job as it was while the lease was held.
CREATE OR REPLACE FUNCTION log_attempt(
    p_held jobs, p_outcome integer, p_state integer, p_ended_at bigint, p_error_type text DEFAULT NULL, p_error_message text DEFAULT NULL
) RETURNS void LANGUAGE sql AS $$
    INSERT INTO attempts (job_id, queue_id, type, key, rank, fence, worker, created_at, run_at, reserved_at,
                          lease_expires_at, ended_at, outcome, state, error_type, error_message, payload_size)
    VALUES (p_held.id, p_held.queue_id, p_held.type, p_held.key, p_held.rank, p_held.fence, p_held.worker,
            p_held.created_at, p_held.run_at, p_held.reserved_at, p_held.expires_at, p_ended_at, p_outcome, p_state,
            p_error_type, p_error_message, octet_length(p_held.payload))
$$;
