-- What an object store keeps beside a queue's jobs, in the database of the queue (or of one shard of it).

-- Immutable objects to which ended jobs and rows of the log have gone, and how much of each is left.
CREATE TABLE segments (
    name     TEXT    PRIMARY KEY,
    -- The number of the last row of the log that it was made with.
    last_row INTEGER NOT NULL,
    -- `image.Entry` as JSON.
    entry    TEXT    NOT NULL
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
