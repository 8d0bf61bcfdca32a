-- The planner writes it in where it is used; to read the sequence like a table costs three times as much.
CREATE OR REPLACE FUNCTION last_repetition() RETURNS bigint LANGUAGE sql RETURN pg_sequence_last_value('repeats'::regclass);
