-- Remove the staged jobs of a write. A series goes on: its write may be staged again, under the same name.
CREATE OR REPLACE FUNCTION abandon_write(p_write text, p_series text, p_number bigint) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(write_lock(p_write));
    IF p_number < 0 THEN
        INSERT INTO published (series, number) VALUES (p_series, p_number) ON CONFLICT (series) DO NOTHING;
    END IF;
    DELETE FROM staged WHERE write = p_write;
END $$ SET search_path FROM CURRENT;
