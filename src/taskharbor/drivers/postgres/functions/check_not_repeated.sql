-- For a new id (see `sql/enqueue.sql`), called after the job is stored, so that all earlier notes are seen. It has no search path
-- of its own, which would cost a single enqueue more than the look. The schema's name may have two dollar signs.
CREATE OR REPLACE FUNCTION check_not_repeated(p_id text) RETURNS boolean LANGUAGE plpgsql AS $check_not_repeated$
BEGIN
    IF EXISTS (SELECT FROM $schema.repeated WHERE call = p_id) THEN
        RAISE unique_violation USING MESSAGE = 'a later try has stored this job';
    END IF;
    RETURN true;
END $check_not_repeated$;
