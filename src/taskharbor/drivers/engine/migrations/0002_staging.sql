-- Jobs that tasks of a bulk write have put down and that nobody sees yet, packed; and the record of decisions about such writes.
CREATE TABLE blobs (
    name TEXT PRIMARY KEY,
    data BLOB NOT NULL
) STRICT;

-- The last portion of a series' write that became jobs: it stands here in the same transaction, so no portion does so twice.
CREATE TABLE portions (
    series   TEXT    NOT NULL PRIMARY KEY,
    number   INTEGER NOT NULL,
    portion  INTEGER NOT NULL,
    added    INTEGER NOT NULL,
    noted_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- One row: what tells this store from another, and the highest number of a row of the log that retention removed.
CREATE TABLE log_marks (
    store_id TEXT    NOT NULL,
    trimmed  INTEGER NOT NULL
) STRICT;
INSERT INTO log_marks VALUES (lower(hex(randomblob(4))), 0);
