-- At random, and not by one: a replica that was promoted without the last ones must not come to a number that somebody knows.
CREATE OR REPLACE FUNCTION note_repetition() RETURNS void LANGUAGE sql
SECURITY DEFINER SET search_path FROM CURRENT
AS $$ SELECT setval('repeats', 1 + (random() * 9e18)::bigint) $$;
