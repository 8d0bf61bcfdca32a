-- Byte layout of stored jobs and of the attempt log. This is the only definition: Python reads the formats from this file.
--
-- A stored job is one string, so that a move between two hashes moves one field:
--
--   lease    only while inflight: LEASE (state, expiry, start, length of the worker's name), then the worker's name
--   token    only while inflight: TOKEN_SIZE bytes
--   front    FRONT: state; fence; number of the first row in the log entry that has the job's last row, or 0; end of the job,
--            or 0; length of the head; 1 for a plain job. Behind a lease these are the values from before the claim
--   head     array packed with MessagePack, by the places below
--   body     codec, headers and timeout, packed by the client; empty where all have their defaults
--   payload  as it came
--   tail     progress of a job that is inflight, result of a job that is done
--   seq      SEQ: the number in the order of acceptance. It stands last because Lua 5.1 hashes every eighth byte or so of a
--            long string and always the last: similar jobs would share a hash and be compared byte by byte
--
-- A claim adds a lease in front. An ack removes it and rewrites the front. The rest is copied unread.
local LAYOUT_VERSION = 5 -- Of all that this file defines, and of the members of sorted sets. A store of another one is refused.
local LEASE = '>I1I8I8I2'
local TOKEN_SIZE = 24
local FRONT = '>I1I4I8I8I4I1'
local SEQ = '>I8'
-- The place of the plain flag, and a size. A library that is being loaded has no `struct` to compute them.
local PLAIN_AT, SEQ_SIZE = 26, 8

-- Places in the head. KEY and MORE are false where there is none; a job with neither is plain.
local RUN_AT, PRIORITY, ATTEMPTS, STALLS, MAX_ATTEMPTS, MAX_STALLS = 1, 2, 3, 4, 5, 6
local CREATED_AT, TYPE, KEY, BODY_SIZE, PAYLOAD_SIZE, MORE = 7, 8, 9, 10, 11, 12
-- Names in MORE, a map of fields that few jobs have. UPDATE is an array of flags: payload, run_at, retry, reset_counts,
-- priority. PROGRESS and RESULT say that the tail is one. SETTLED is the token of the lease that was settled last.
local LAST_ERROR, FAILED_AT, UPDATE, CANCEL_REQUESTED, MERGED_INTO = 'e', 'f', 'u', 'c', 'm'
local PROGRESS, RESULT, IDEMPOTENCY_KEY, BACKOFF_MIN, BACKOFF_MAX = 'p', 'r', 'i', 'b', 'B'
local SETTLED = 't'

-- States. A stored job that waits is READY, due or not: each reader compares run_at with its own clock. SCHEDULED occurs in
-- answers and in the log only.
local SCHEDULED, READY, BLOCKED, INFLIGHT, DONE, DEAD, CANCELLED = 0, 1, 2, 3, 4, 5, 6

-- A job's place in line: its type behind the length of that, which keeps a type apart from any other that begins like it; then
-- PLACE: priority, highest first; run_at + 2^53 in two halves, so that a number of Lua is exact and instants before 1970 come
-- first; seq. Sorted byte by byte this is the order of claims.
local PLACE = '>I2I4I4I8'
local PLACE_SIZE, LOWEST_PRIORITY = 18, 32767

-- The attempt log is a stream. Rows that ended alike share an entry, whose id is the number of its last row:
--
--   front   ENTRY: end, outcome, state of the jobs afterwards, number of rows, length of the error, length of the lease
--   error   {type, message} packed with MessagePack; empty where there is none
--   lease   as in the stored job, without the token; empty where the jobs were not inflight
--   rows    ROW: length of the id, length of the head, fence, number of the first row in the entry of the job's previous row
--           (0: none); then id; then head of the stored job from before the change
local ENTRY = '>I8I1I1I2I4I2'
local ROW = '>I2I4I4I8'
local OUTCOME_DONE, RETRIED, OUTCOME_DEAD, EXPIRED, RELEASED, OUTCOME_CANCELLED, MERGED, REQUEUED = 0, 1, 2, 3, 4, 5, 6, 7
