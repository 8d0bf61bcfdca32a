-- The advisory lock of a write. A task that stages holds it shared; a caller that publishes or abandons holds it alone. So
-- nothing is staged after that caller has looked.
CREATE OR REPLACE FUNCTION write_lock(p_write text) RETURNS bigint LANGUAGE sql STABLE
RETURN hashtextextended(p_write, 'staged'::regclass::oid::bigint);
