-- Make an id in the form of the clients' ids: time first, so the index grows at its end.
CREATE OR REPLACE FUNCTION new_job_id(p_now bigint) RETURNS text LANGUAGE sql VOLATILE
RETURN (
    SELECT substr(t, 1, 8) || '-' || substr(t, 9, 4) || '-7' || substr(r, 16, 21)
    FROM (SELECT lpad(to_hex(p_now / 1000), 12, '0') AS t, gen_random_uuid()::text AS r) AS parts
);
