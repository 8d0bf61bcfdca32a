-- Note the last row of the log that retention removes. Rows of earlier epochs have numbers of another cluster.
CREATE OR REPLACE FUNCTION note_trimmed(p_xid xid8, p_seq bigint) RETURNS void LANGUAGE sql
BEGIN ATOMIC
    UPDATE epochs SET trimmed_xid = p_xid, trimmed_seq = p_seq
    WHERE epoch = (SELECT max(e.epoch) FROM epochs AS e) AND (trimmed_xid, trimmed_seq) < (p_xid, p_seq);
END;
