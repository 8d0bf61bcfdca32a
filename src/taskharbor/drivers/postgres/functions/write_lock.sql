-- The advisory lock of a write: whoever stages holds it shared, whoever publishes or abandons alone. So nothing is staged behind
-- the back of one who has just looked what there is.
CREATE OR REPLACE FUNCTION write_lock(p_write text) RETURNS bigint LANGUAGE sql STABLE
RETURN hashtextextended(p_write, 'staged'::regclass::oid::bigint);
