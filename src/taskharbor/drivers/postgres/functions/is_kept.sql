-- Return true if a job is known, in any table.
CREATE OR REPLACE FUNCTION is_kept(p_id text) RETURNS boolean LANGUAGE sql STABLE
RETURN EXISTS (SELECT FROM jobs WHERE id = p_id) OR EXISTS (SELECT FROM ended WHERE id = p_id);
