-- Jobs that tasks of a bulk write have put down and that nobody sees yet: up to a thousand to a row, encoded. A last row of
-- every task, without jobs, says by its number how many rows came before.
CREATE TABLE staged (
    write        TEXT    NOT NULL,
    task         TEXT    NOT NULL,
    number       INTEGER NOT NULL,
    staged_at    INTEGER NOT NULL,
    chunk        BLOB,
    PRIMARY KEY (write, task, number)
) STRICT;

-- Writes that were published, so that publishing one again changes nothing. A series of numbered writes (the batches of a
-- stream) has one row, with the latest number; a write of its own has number -1. jobs NULL: abandoned.
CREATE TABLE published (
    series       TEXT    NOT NULL PRIMARY KEY,
    number       INTEGER NOT NULL,
    published_at INTEGER NOT NULL,
    jobs         INTEGER
) STRICT, WITHOUT ROWID;
