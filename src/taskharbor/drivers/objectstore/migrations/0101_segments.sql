-- What an object store keeps beside a queue's jobs, in the database of the queue (or of one shard of it).

-- Immutable objects to which ended jobs and rows of the log have gone, and how much of each is left.
CREATE TABLE segments (
    name          TEXT    PRIMARY KEY,
    -- How often it was merged.
    level         INTEGER NOT NULL,
    -- Bytes of the object.
    size          INTEGER NOT NULL,
    -- Rows of the log that are left. The numbers and ids are those it was made with.
    rows          INTEGER NOT NULL,
    first_row     INTEGER NOT NULL,
    last_row      INTEGER NOT NULL,
    first_row_id  TEXT    NOT NULL,
    last_row_id   TEXT    NOT NULL,
    -- No row that is left ended before this.
    oldest_row    INTEGER NOT NULL,
    -- Jobs that are left.
    jobs          INTEGER NOT NULL,
    first_job     INTEGER NOT NULL,
    last_job      INTEGER NOT NULL,
    first_job_id  TEXT    NOT NULL,
    last_job_id   TEXT    NOT NULL,
    oldest_job    INTEGER NOT NULL,
    -- Retention has taken everything up to here, in the order of (end, number).
    rows_gone_at  INTEGER NOT NULL,
    rows_gone_seq INTEGER NOT NULL,
    jobs_gone_at  INTEGER NOT NULL,
    jobs_gone_seq INTEGER NOT NULL,
    -- Numbers of jobs that are gone besides, as JSON.
    purged        TEXT    NOT NULL
) STRICT;

-- Objects that are no part of the queue: those that somebody is writing, and those that were replaced and may still be read.
CREATE TABLE loose_segments (
    name     TEXT    PRIMARY KEY,
    is_begun INTEGER NOT NULL,
    since    INTEGER NOT NULL
) STRICT;

-- Jobs for the failure queue, which is another object. They leave when they have arrived there.
CREATE TABLE outbox (
    id     TEXT PRIMARY KEY,
    record BLOB NOT NULL
) STRICT;

INSERT INTO sqlite_sequence (name, seq) VALUES ('attempts', 0);
