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

-- Jobs that have not ended: the only rows that are ever updated. Who ends a job deletes its row here and writes it to
-- `ended` in the same transaction.
CREATE TABLE jobs (
    seq              bigint NOT NULL DEFAULT nextval('job_seq'),
    run_at           bigint NOT NULL,
    created_at       bigint NOT NULL,
    reserved_at      bigint,
    expires_at       bigint,
    failed_at        bigint,
    -- This, merged_into and result are of jobs that have ended: see `ended`.
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
    -- 0 and 1 both wait: which of them a job is in truth follows from run_at and the caller's clock. What is stored is
    -- what it was when it was written, so that the counters can be moved without counting.
    state            smallint NOT NULL,
    -- Flags of UpdateFlags: 1 payload, 2 retry, 4 reset_counts, 8 * (0 no, 1 yes, 2 later, 3 earlier) for run_at.
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

-- Every index is paid for when a job is stored and again when it is claimed. Numbers are only looked for in ranges, by
-- listings, and rows lie in their order: a summary per range of pages is enough.
CREATE INDEX jobs_places ON jobs USING brin (seq) WITH (pages_per_range = 32, autosummarize = on);
CREATE INDEX jobs_waiting ON jobs (queue_id, rank, run_at, seq) WHERE state <= 1;
-- For claims by type, which most workers make.
CREATE INDEX jobs_waiting_type ON jobs (queue_id, type, rank, run_at, seq) WHERE state <= 1;
-- When something is to be done about those that are scheduled, which have no expires_at, and those that are leased.
CREATE INDEX jobs_due ON jobs (queue_id, state, coalesce(expires_at, run_at)) WHERE state = 0 OR state = 3;
-- Of each key one job waits and one is inflight.
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
    -- The key of a request that changed this job, which waited for the same `key`. All others are found by the job's own key.
    is_led           boolean NOT NULL DEFAULT false,
    PRIMARY KEY (queue_id, idempotency_key)
);
CREATE INDEX idempotency_led ON idempotency (job_seq) WHERE is_led;

-- The clusters that the tables have been in: dump and restore bring them to another, where transactions are numbered anew.
CREATE TABLE epochs (
    epoch           bigint PRIMARY KEY,
    system_id       bigint NOT NULL,
    -- In the last row: the last row of the log, in the order of readers, that retention removed. Who comes from before it has
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

-- What every transaction changed, one row per queue and batch, only ever appended: counters as rows that are updated would
-- grow a chain of dead versions while somebody holds a snapshot. Of each queue the old ones are folded into one from time to time.
-- It also tells a claimer what it must look at again: see `claim`.
CREATE TABLE moves (
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    -- Of a row that others were folded into: they were of transactions before this one.
    folded          xid8,
    -- The earliest run_at among jobs that began to wait here, whatever their rank.
    low_run_at      bigint,
    -- The latest run_at among jobs stored as ready (not as scheduled).
    high_run_at     bigint,
    -- The earliest expires_at among leases granted here.
    low_expires_at  bigint,
    -- The latest instant at which a lease that ended here was valid: no later lease begins before it.
    latest_end      bigint,
    -- How many jobs came to be in each state (or left it); NULL: none.
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
    -- 0: nobody needs to know. 1: something may have become runnable. 2: and those who wait are to be told.
    stir            smallint NOT NULL DEFAULT 0,
    ranks           smallint[]
);
-- For those who publish all tables: rows without a key can then still be deleted.
ALTER TABLE moves REPLICA IDENTITY FULL;
CREATE INDEX moves_order ON moves (queue_id, xid);

-- Days of which a queue's rows were removed before those of others: looked through once, not at every upkeep.
CREATE TABLE swept (
    day             text NOT NULL,
    queue_id        integer NOT NULL,
    PRIMARY KEY (day, queue_id)
);

-- When moves were folded last, and the oldest transaction that ran then: the next folding goes that far. So the moves of the
-- last while stay, and claimers that have looked within it lose track of nothing.
CREATE TABLE upkeep (
    folded_at       timestamptz NOT NULL,
    horizon         xid8 NOT NULL
);
INSERT INTO upkeep VALUES ('-infinity', '0');

-- Calls of which the answer was lost and that were made again: the secret of a claim or the id of a job, and the number of the
-- latest try. The server may read an earlier try only now, from a connection that nobody listens to any more: it would lease
-- jobs to nobody, or store a job that has run and is gone.
CREATE TABLE repeated (
    call            text COLLATE "C" PRIMARY KEY,
    try             integer NOT NULL,
    made_at         timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- What a claimer remembers between two claims: see `claim`.
CREATE TYPE claim_hint AS (
    queue_id         integer,
    -- The snapshot in which the rest was true.
    seen             pg_snapshot,
    -- The latest instant at which an ended lease was valid.
    floor            bigint,
    -- The earliest expiry of a lease.
    low_expiry       bigint,
    -- Of each rank the place of the first waiting job.
    ranks            smallint[],
    run_ats          bigint[],
    seqs             bigint[],
    -- Claims since these places were looked for.
    uses             integer
);

-- Jobs of one queue without keys. An array has a value for each, or one for all. Payloads come as one value with the places where
-- they end: an array of a thousand byte strings costs more to build.
CREATE TYPE job_batch AS (
    queue            text,
    ids              text[],
    types            text[],
    run_ats          bigint[],
    created_ats      bigint[],
    ranks            smallint[],
    -- NULL: no job has any; an empty text: this one has none.
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

-- Jobs by the million: put down by many tasks where nobody sees them, then published in one transaction. A row holds thousands of
-- jobs, so that staging, finding and forgetting them costs next to nothing per job. Unlogged: what a crash of the server takes
-- away was visible to nobody, and publishing finds that it is gone.
CREATE UNLOGGED TABLE staged (
    write            text COLLATE "C" NOT NULL,
    task             text COLLATE "C" NOT NULL,
    -- Counts up within the task. A last row without jobs says that the task is complete, and by its number how many came before.
    number           integer NOT NULL,
    is_last          boolean NOT NULL DEFAULT false,
    staged_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    jobs             integer NOT NULL DEFAULT 0,
    -- Jobs without ids get them when they are published: in the order of the jobs, which spares the index a search for each.
    batch            job_batch,
    -- Numbers of jobs with idempotency keys. Who publishes gives them out before anything else.
    seqs             bigint[],
    -- Jobs with keys, as `enqueue_by_rules` takes them; the batch then holds their payloads only. And how many locks it takes.
    by_rules         json,
    locks            integer
) WITH (autovacuum_vacuum_threshold = 100);
CREATE INDEX staged_write ON staged (write);
-- Compressing what is read once, a moment later, would cost more than all the rest.
ALTER TABLE staged ALTER COLUMN batch SET STORAGE EXTERNAL, ALTER COLUMN by_rules SET STORAGE EXTERNAL,
    ALTER COLUMN seqs SET STORAGE EXTERNAL;

-- Writes that were published, so that publishing one again changes nothing. A series of numbered writes (the batches of a
-- stream) has one row, with the latest number: earlier ones are never published after it. A write of its own has number -1.
-- jobs NULL: abandoned, so that a task that comes late leaves nothing behind.
CREATE TABLE published (
    series         text COLLATE "C" PRIMARY KEY,
    number         bigint NOT NULL,
    -- The last portion that became jobs, of a write that comes through the driver contract; others become jobs as a whole.
    portion        integer NOT NULL DEFAULT 2147483647,
    published_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    jobs           bigint
);

-- Blobs of bulk writes that come through the driver contract (see `taskharbor.bulk`), and the record of decisions about them.
CREATE TABLE blobs (
    name           text COLLATE "C" PRIMARY KEY,
    data           bytea NOT NULL
);
ALTER TABLE blobs ALTER COLUMN data SET STORAGE EXTERNAL;
