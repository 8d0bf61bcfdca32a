-- Return a job as one more request with the same key changes it. Returns nothing if there is no job.
CREATE OR REPLACE FUNCTION changed_by(p_job jobs, p_by jobs, p_flags smallint) RETURNS jobs LANGUAGE plpgsql AS $$
DECLARE
    v_flags smallint := CASE WHEN p_by.id IS NULL THEN 0 ELSE coalesce(p_flags, 1) END;
BEGIN
    IF v_flags & 1 <> 0 THEN
        p_job.type := p_by.type;
        p_job.payload := p_by.payload;
        p_job.codec := p_by.codec;
        p_job.headers := p_by.headers;
        p_job.timeout_us := p_by.timeout_us;
    END IF;
    p_job.run_at := CASE v_flags & 24 WHEN 8 THEN p_by.run_at WHEN 16 THEN greatest(p_job.run_at, p_by.run_at)
                                      WHEN 24 THEN least(p_job.run_at, p_by.run_at) ELSE p_job.run_at END;
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
    IF v_flags < 0 THEN
        p_job.rank := p_by.rank;
    END IF;
    RETURN p_job;
END $$;
