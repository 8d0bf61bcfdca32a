CREATE OR REPLACE FUNCTION state_by_run_at(p_run_at bigint, p_now bigint) RETURNS smallint LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_run_at > p_now THEN 0 ELSE 1 END;
