-- States (in the order of JobState):  0 scheduled, 1 ready, 2 blocked, 3 inflight, 4 done, 5 dead, 6 cancelled
-- Outcomes (in the order of Outcome): 0 done, 1 retried, 2 dead, 3 expired, 4 released, 5 cancelled, 6 merged, 7 requeued
-- Instants and durations are microseconds. NULL in a column of a job means the default, so that most jobs are short rows.
-- Every query repeats the condition of the partial index it uses literally.

CREATE SEQUENCE job_seq AS bigint CACHE 1;
CREATE SEQUENCE attempt_seq AS bigint CACHE 1;

CREATE TABLE queues (
    id               integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name             text COLLATE "C" NOT NULL UNIQUE,
    paused           boolean NOT NULL DEFAULT false,
    max_inflight     integer,
    failure_queue    text,
    keep_done_us     bigint,
    keep_dead_us     bigint,
    keep_attempts_us bigint
);

-- Jobs that have not ended: the only rows that are ever updated. The transaction that ends a job deletes its row here and writes
-- it to `ended`.
CREATE TABLE jobs (
    seq              bigint NOT NULL DEFAULT nextval('job_seq'),
    run_at           bigint NOT NULL,
    created_at       bigint NOT NULL,
    reserved_at      bigint,
    expires_at       bigint,
    failed_at        bigint,
    -- This column, merged_into and result are for jobs that have ended: see `ended`.
    finished_at      bigint,
    timeout_us       bigint,
    backoff_min_us   bigint,
    backoff_max_us   bigint,
    fence            bigint NOT NULL DEFAULT 0,
    queue_id         integer NOT NULL,
    max_attempts     integer NOT NULL,
    max_stalls       integer,
    attempts         integer NOT NULL DEFAULT 0,
    stalls           integer NOT NULL DEFAULT 0,
    -- Minus the priority: an index in one direction serves "priority descending, run_at ascending".
    rank             smallint NOT NULL,
    -- 0 and 1 both wait: run_at and the caller's clock decide which of them a job is. The stored value is that of the write, so
    -- that the counters can change without counting.
    state            smallint NOT NULL,
    -- Flags of UpdateFlags: 1 payload, 2 retry, 4 reset_counts, 8 * (0 no, 1 yes, 2 later, 3 earlier) for run_at,
    -- -32 priority (a version that does not know it reads the others).
    flags            smallint,
    cancel_requested boolean NOT NULL DEFAULT false,
    id               text COLLATE "C" PRIMARY KEY,
    type             text COLLATE "C" NOT NULL,
    key              text COLLATE "C",
    token            text COLLATE "C",
    worker           text COLLATE "C",
    codec            text,
    headers          text,
    idempotency_key  text,
    last_error       text,
    merged_into      text,
    progress         bytea,
    result           bytea,
    payload          bytea NOT NULL
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_analyze_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Every index costs time when a job is stored and again when it is claimed. Only listings search for numbers, in ranges, and rows
-- are in the order of numbers. So a summary per range of pages (BRIN) is enough.
CREATE INDEX jobs_places ON jobs USING brin (seq) WITH (pages_per_range = 32, autosummarize = on);
CREATE INDEX jobs_waiting ON jobs (queue_id, rank, run_at, seq) WHERE state <= 1;
-- For claims by type, which most workers make.
CREATE INDEX jobs_waiting_type ON jobs (queue_id, type, rank, run_at, seq) WHERE state <= 1;
-- The next due time: of scheduled jobs, which have no expires_at, and of leased jobs.
CREATE INDEX jobs_due ON jobs (queue_id, state, coalesce(expires_at, run_at)) WHERE state = 0 OR state = 3;
-- At most one job of each key waits, and one is inflight.
CREATE UNIQUE INDEX jobs_key ON jobs (queue_id, key, (state = 3)) WHERE key IS NOT NULL;

-- Jobs that have ended, as rows of the same shape.
CREATE TABLE ended (LIKE jobs INCLUDING DEFAULTS) PARTITION BY LIST (state);
-- Done and cancelled jobs, by the day they ended: retention drops whole days.
CREATE TABLE finished PARTITION OF ended FOR VALUES IN (4, 6) PARTITION BY RANGE (finished_at);
CREATE INDEX finished_id ON finished (id);
-- Jobs end roughly in the order they came: a summary per range of pages is enough to find a time or a number, and costs
-- next to nothing when a job ends. A second and third tree would make ending a job a quarter more expensive.
CREATE INDEX finished_places ON finished USING brin (seq, finished_at) WITH (pages_per_range = 32, autosummarize = on);
CREATE TABLE finished_rest PARTITION OF finished DEFAULT;
-- Dead jobs are few, are kept longer and can come back.
CREATE TABLE dead PARTITION OF ended (PRIMARY KEY (seq)) FOR VALUES IN (5);
CREATE UNIQUE INDEX dead_id ON dead (id);
CREATE INDEX dead_ended ON dead (queue_id, finished_at);

CREATE TABLE idempotency (
    queue_id         integer NOT NULL,
    idempotency_key  text COLLATE "C" NOT NULL,
    job_seq          bigint NOT NULL,
    job_id           text COLLATE "C" NOT NULL,
    -- The idempotency key of a request that changed this job, which waited for the same `key`. Other keys are found by the job's
    -- own column.
    is_led           boolean NOT NULL DEFAULT false,
    PRIMARY KEY (queue_id, idempotency_key)
);
CREATE INDEX idempotency_led ON idempotency (job_seq) WHERE is_led;

-- The clusters in which the tables have been. Dump and restore move them to another, where transaction numbers begin again.
CREATE TABLE epochs (
    epoch           bigint PRIMARY KEY,
    system_id       bigint NOT NULL,
    -- In the last row: the last row of the log, in the order of readers, that retention removed. A reader from before it has
    -- missed rows.
    trimmed_xid     bigint NOT NULL DEFAULT 0,
    trimmed_seq     bigint NOT NULL DEFAULT 0
);
INSERT INTO epochs SELECT 1, system_identifier FROM pg_control_system();

-- The number of a transaction with the epoch in front: it grows from cluster to cluster.
CREATE FUNCTION log_xid(p_xid xid8) RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
RETURN ((SELECT max(epoch) FROM epochs) << 48) + p_xid::text::bigint;

-- The attempt log, by the day the lease ended. Rows of one transaction carry its number: a sequence gives numbers in another
-- order than commits happen, so a reader goes by (xid, seq) and stops below the oldest transaction still running.
CREATE TABLE attempts (
    seq              bigint NOT NULL DEFAULT nextval('attempt_seq'),
    xid              bigint NOT NULL DEFAULT log_xid(pg_current_xact_id()),
    fence            bigint NOT NULL,
    created_at       bigint NOT NULL,
    run_at           bigint NOT NULL,
    reserved_at      bigint,
    lease_expires_at bigint,
    ended_at         bigint NOT NULL,
    queue_id         integer NOT NULL,
    payload_size     integer NOT NULL,
    rank             smallint NOT NULL,
    outcome          smallint NOT NULL,
    state            smallint NOT NULL,
    job_id           text COLLATE "C" NOT NULL,
    type             text COLLATE "C" NOT NULL,
    key              text COLLATE "C",
    worker           text COLLATE "C",
    error_type       text,
    error_message    text
) PARTITION BY RANGE (ended_at);

CREATE INDEX attempts_order ON attempts (xid, seq);
CREATE INDEX attempts_job ON attempts (job_id);
CREATE INDEX attempts_ended ON attempts USING brin (ended_at) WITH (pages_per_range = 32, autosummarize = on);
CREATE TABLE attempts_rest PARTITION OF attempts DEFAULT;

-- The changes of every transaction, one row per queue and batch, only ever appended. Counters in updated rows would grow a chain
-- of dead versions while somebody holds a snapshot. The old rows of each queue are folded into one from time to time. The table
-- also tells a claimer what it must look at again: see `claim`.
CREATE TABLE moves (
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    -- For a row that others were folded into: their transactions were before this one.
    folded          xid8,
    -- The earliest run_at among jobs that began to wait here, of any rank.
    low_run_at      bigint,
    -- The latest run_at among jobs stored as ready (not as scheduled).
    high_run_at     bigint,
    -- The earliest expires_at among leases granted here.
    low_expires_at  bigint,
    -- The latest instant at which a lease that ended here was valid: no later lease begins before it.
    latest_end      bigint,
    -- The number of jobs that entered each state (negative: left it); NULL: none.
    scheduled       bigint,
    ready           bigint,
    blocked         bigint,
    inflight        bigint,
    done            bigint,
    dead            bigint,
    cancelled       bigint,
    done_total      bigint,
    dead_total      bigint,
    cancelled_total bigint,
    queue_id        integer NOT NULL,
    -- 0: no notice. 1: something may have become runnable. 2: and waiters are notified.
    stir            smallint NOT NULL DEFAULT 0,
    ranks           smallint[]
);
-- For servers that publish all tables (logical replication): rows without a key can then still be deleted.
ALTER TABLE moves REPLICA IDENTITY FULL;
CREATE INDEX moves_order ON moves (queue_id, xid);

-- Days whose rows of one queue were removed before those of others: searched once, not at every upkeep.
CREATE TABLE swept (
    day             text NOT NULL,
    queue_id        integer NOT NULL,
    PRIMARY KEY (day, queue_id)
);

-- The time of the last folding, and the oldest transaction that ran then: the next folding goes that far. So recent moves stay,
-- and the hints of recent claims stay valid.
CREATE TABLE upkeep (
    folded_at       timestamptz NOT NULL,
    horizon         xid8 NOT NULL
);
INSERT INTO upkeep VALUES ('-infinity', '0');

-- Calls that were repeated because their answer was lost: the secret of a claim or the id of a job, and the number of the latest
-- try. The server may read an earlier try only now, from a connection that its client has left. It would lease jobs to nobody, or
-- store a job that has run and is removed.
CREATE TABLE repeated (
    call            text COLLATE "C" PRIMARY KEY,
    try             integer NOT NULL,
    made_at         timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The hint that a claimer keeps between two claims: see `claim`.
CREATE TYPE claim_hint AS (
    queue_id         integer,
    -- The snapshot in which the rest was true.
    seen             pg_snapshot,
    -- The latest instant at which an ended lease was valid.
    floor            bigint,
    -- The earliest expiry of a lease.
    low_expiry       bigint,
    -- The place of the first waiting job, for each rank.
    ranks            smallint[],
    run_ats          bigint[],
    seqs             bigint[],
    -- Claims since these places were looked for.
    uses             integer
);

-- Jobs of one queue without keys. An array has a value for each job, or one for all. Payloads are one joined value with the ends
-- of each: an array of a thousand byte strings costs more to build.
CREATE TYPE job_batch AS (
    queue            text,
    ids              text[],
    types            text[],
    run_ats          bigint[],
    created_ats      bigint[],
    ranks            smallint[],
    -- NULL: no job has any; an empty text: this job has none.
    headers          text[],
    idempotency_keys text[],
    max_attempts     integer,
    max_stalls       integer,
    codec            text,
    timeout_us       bigint,
    backoff_min_us   bigint,
    backoff_max_us   bigint,
    flags            smallint,
    payloads         bytea,
    ends             integer[]
);

-- Bulk writes: many tasks stage jobs here, where no reader sees them, and one transaction publishes them. A row holds thousands
-- of jobs, so staging, finding and removing them costs next to nothing per job. Unlogged: rows that a crash of the server removes
-- were visible to nobody, and publishing finds that they are gone.
CREATE UNLOGGED TABLE staged (
    write            text COLLATE "C" NOT NULL,
    task             text COLLATE "C" NOT NULL,
    -- Counts up within the task. A last row without jobs says that the task is complete; its number is the number of rows before
    -- it.
    number           integer NOT NULL,
    is_last          boolean NOT NULL DEFAULT false,
    staged_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    jobs             integer NOT NULL DEFAULT 0,
    -- Jobs without ids get them when they are published, in the order of the jobs. So the index needs no search for each.
    batch            job_batch,
    -- Numbers of jobs with idempotency keys. The publisher gives them out before anything else.
    seqs             bigint[],
    -- Jobs with keys, as `enqueue_by_rules` takes them, and the number of locks. The batch then holds only their payloads.
    by_rules         json,
    locks            integer
) WITH (autovacuum_vacuum_threshold = 100);
CREATE INDEX staged_write ON staged (write);
-- Not compressed: the rows are read once, a moment later, and compressing them would cost more than all the rest.
ALTER TABLE staged ALTER COLUMN batch SET STORAGE EXTERNAL, ALTER COLUMN by_rules SET STORAGE EXTERNAL,
    ALTER COLUMN seqs SET STORAGE EXTERNAL;

-- Published writes, so that publishing one again changes nothing. A series of numbered writes (the batches of a stream) has one
-- row, with the latest number: earlier ones are never published after it. A single write has number -1. jobs NULL: abandoned, so
-- that a late task leaves nothing behind.
CREATE TABLE published (
    series         text COLLATE "C" PRIMARY KEY,
    number         bigint NOT NULL,
    -- The last portion that became jobs, for a write through the driver contract. Other writes become jobs as a whole.
    portion        integer NOT NULL DEFAULT 2147483647,
    published_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    jobs           bigint
);

-- Blobs of bulk writes through the driver contract (see `taskharbor.bulk`), and the record of decisions about them.
CREATE TABLE blobs (
    name           text COLLATE "C" PRIMARY KEY,
    data           bytea NOT NULL
);
ALTER TABLE blobs ALTER COLUMN data SET STORAGE EXTERNAL;
