-- States (in the order of JobState):  0 scheduled, 1 ready, 2 blocked, 3 inflight, 4 done, 5 dead, 6 cancelled
-- Outcomes (in the order of Outcome): 0 done, 1 retried, 2 dead, 3 expired, 4 released, 5 cancelled, 6 merged, 7 requeued
-- Every partial index repeats its condition literally in the queries that use it: SQLite proves no more than that.

CREATE TABLE queues (
    id               INTEGER PRIMARY KEY,
    name             TEXT    NOT NULL UNIQUE,
    -- Grows whenever something may have become runnable; a waiting process compares it with what it saw last.
    stirred          INTEGER NOT NULL DEFAULT 0,
    -- The latest end of a lease: no later lease begins before it, whatever its caller's clock says.
    latest_end       INTEGER NOT NULL DEFAULT 0,
    paused           INTEGER NOT NULL DEFAULT 0,
    max_inflight     INTEGER,
    failure_queue    TEXT,
    keep_done_us     INTEGER,
    keep_dead_us     INTEGER,
    keep_attempts_us INTEGER,
    -- Jobs per state now, moved by per-batch deltas in the transaction that moves the jobs.
    scheduled        INTEGER NOT NULL DEFAULT 0,
    ready            INTEGER NOT NULL DEFAULT 0,
    blocked          INTEGER NOT NULL DEFAULT 0,
    inflight         INTEGER NOT NULL DEFAULT 0,
    done             INTEGER NOT NULL DEFAULT 0,
    dead             INTEGER NOT NULL DEFAULT 0,
    cancelled        INTEGER NOT NULL DEFAULT 0,
    done_total       INTEGER NOT NULL DEFAULT 0,
    dead_total       INTEGER NOT NULL DEFAULT 0,
    cancelled_total  INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE jobs (
    seq              INTEGER PRIMARY KEY,
    queue_id         INTEGER NOT NULL,
    state            INTEGER NOT NULL,
    priority         INTEGER NOT NULL,
    run_at           INTEGER NOT NULL,
    expires_at       INTEGER,
    token            TEXT,
    worker           TEXT,
    reserved_at      INTEGER,
    fence            INTEGER NOT NULL DEFAULT 0,
    attempts         INTEGER NOT NULL DEFAULT 0,
    stalls           INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    finished_at      INTEGER,
    failed_at        INTEGER,
    created_at       INTEGER NOT NULL,
    max_attempts     INTEGER NOT NULL,
    max_stalls       INTEGER NOT NULL,
    id               TEXT    NOT NULL,
    type             TEXT    NOT NULL,
    job_key          TEXT,
    -- What SQL never looks at (codec, headers, timeout, flags, back-off), as JSON; NULL where all are defaults.
    spec             TEXT,
    last_error       TEXT,
    merged_into      TEXT,
    progress         BLOB,
    payload_size     INTEGER NOT NULL,
    -- NULL where it is too long to be rewritten with every move of the job: then it stands in `payloads`.
    payload          BLOB
) STRICT;

CREATE UNIQUE INDEX jobs_id ON jobs (id);
CREATE INDEX jobs_ready ON jobs (queue_id, priority DESC, run_at, seq) WHERE state = 1;
CREATE INDEX jobs_scheduled ON jobs (queue_id, priority DESC, run_at, seq) WHERE state = 0;
-- For claims by type, which most workers make. The first takes 7% of the CPU time of an enqueue, and a drain hardly more.
CREATE INDEX jobs_ready_type ON jobs (queue_id, type, priority DESC, run_at, seq) WHERE state = 1;
CREATE INDEX jobs_scheduled_type ON jobs (queue_id, type, priority DESC, run_at, seq) WHERE state = 0;
CREATE INDEX jobs_leases ON jobs (queue_id, expires_at) WHERE state = 3;
CREATE INDEX jobs_ended ON jobs (queue_id, state, finished_at) WHERE finished_at IS NOT NULL;
CREATE UNIQUE INDEX jobs_waiting_key ON jobs (queue_id, job_key) WHERE job_key IS NOT NULL AND state < 3;
CREATE UNIQUE INDEX jobs_inflight_key ON jobs (queue_id, job_key) WHERE job_key IS NOT NULL AND state = 3;

CREATE TABLE payloads (
    seq  INTEGER PRIMARY KEY,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE results (
    seq  INTEGER PRIMARY KEY,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE idempotency (
    queue_id        INTEGER NOT NULL,
    idempotency_key TEXT    NOT NULL,
    job_id          TEXT    NOT NULL,
    PRIMARY KEY (queue_id, idempotency_key)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_job ON idempotency (job_id);

-- One writer at a time means that the order of seq is the order of commits. AUTOINCREMENT: a number that retention freed
-- must never come back, or a reader's cursor would step over it.
CREATE TABLE attempts (
    seq              INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id           TEXT    NOT NULL,
    queue_id         INTEGER NOT NULL,
    type             TEXT    NOT NULL,
    job_key          TEXT,
    priority         INTEGER NOT NULL,
    fence            INTEGER NOT NULL,
    worker           TEXT,
    created_at       INTEGER NOT NULL,
    run_at           INTEGER NOT NULL,
    reserved_at      INTEGER,
    lease_expires_at INTEGER,
    ended_at         INTEGER NOT NULL,
    outcome          INTEGER NOT NULL,
    state            INTEGER NOT NULL,
    error_type       TEXT,
    error_message    TEXT,
    payload_size     INTEGER NOT NULL,
    -- Of the job while it is kept: a number is a quarter of an id, and every ended lease adds to this index.
    job_seq          INTEGER NOT NULL
) STRICT;

CREATE INDEX attempts_job ON attempts (job_seq);
CREATE INDEX attempts_age ON attempts (queue_id, ended_at);
