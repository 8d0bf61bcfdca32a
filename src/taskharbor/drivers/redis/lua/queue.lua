-- Keys of a queue. Every function that works on a queue takes them in this order; `library.py` reads the names from these lines.
local waiting        -- zset    job id -> run_at of every waiting job; negative where it is blocked
local active         -- zset    id:worker -> when the lease expires
local waiting_job    -- hash    job id -> stored job, while it waits
local active_job     -- hash    job id -> stored job, while it is inflight
local finished_job   -- hash    job id -> stored job, once it has ended
local ready          -- zset    type, place in the line and id of every job that may be claimed; all scores are 0
local types          -- set     type of every job in `ready`, and perhaps others
local scheduled      -- zset    job id -> run_at of jobs that were not due when they were stored
local jobs           -- zset    job id -> number of every job, in the order of acceptance
local done           -- zset    job id -> when it ended
local dead           -- zset    job id -> when it ended
local cancelled      -- zset    job id -> when it ended
local waiting_key    -- hash    key -> id of the one job that waits for it
local active_key     -- hash    key -> id of the one job that is inflight for it
local accepted       -- hash    idempotency key -> id of the job it led to
local led_here       -- hash    job id -> idempotency keys that led to it and are not its own
local settings       -- hash    the operator's settings
local meta           -- hash    counters and high-water marks
local attempts       -- stream  the attempt log
local late           -- zset    id of an entry of the log -> its end, of rows that ended before a row in front of them
local outbox         -- list    dead jobs that the failure queue has yet to be told of
local repeated       -- zset    name of a call that was sent again -> when
local notify         -- stream  one entry, the number of the queue's last move, for blocking claims

-- Variables of one call; `begin` in define.lua sets them anew for each.
local call           -- redis.call; a library that is being loaded cannot read it
local is_again       -- true if the call is repeated, because the answer to an earlier try was lost
local channel        -- first argument: the channel for notifications; empty if nobody listens
local now            -- second argument: the caller's clock, the only one that functions compare with
local is_stirred     -- true if something may have become runnable. Waiters are notified once, at the end of the call

-- Runs a command with many values, in portions that fit on the Lua stack. Returns the replies, where there is one for each value.
local function call_with(command, key, values)
  local replies = {}
  for first = 1, #values, 4000 do
    local portion = call(command, key, unpack(values, first, math.min(first + 3999, #values)))
    if #values <= 4000 then return portion end
    for n = 1, type(portion) == 'table' and #portion or 0 do replies[#replies + 1] = portion[n] end
  end
  return replies
end

-- Counts a move, if there was one, and notifies subscribers of the channel and blocking claims. Waiters compare the number
-- with the last they saw, so they miss nothing.
local function wake()
  if not is_stirred then return nil end
  local moves = call('HINCRBY', meta, 'moves', 1)
  if channel ~= '' then
    -- A user without rights on channels may not publish. Waiters then look for jobs every `poll` seconds.
    redis.pcall('PUBLISH', channel, moves)
    -- Fails if somebody deleted the counter and left the stream. Blocking claims then end a little later by themselves.
    redis.pcall('XADD', notify, 'MAXLEN', 1, moves .. '-0', 'm', '')
  end
  return moves
end

local function server_time()
  local time = call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Return a number that grows with every accepted job and every log row, and is never given twice: the server's own time in
-- microseconds, or one more than the last if that is later. A promoted replica that lost writes goes on from its own clock. The
-- number only orders.
local function stamp_after(last)
  return math.max(server_time(), tonumber(last or 0) + 1)
end

-- A call whose answer was lost is repeated under the same name. If the server reads the first try after the second, the first
-- must do nothing.

local KEEP_FOR = 3600 * 1000000

local function note_repeated(name)
  call('ZREMRANGEBYSCORE', repeated, '-inf', now - KEEP_FOR)
  call('ZADD', repeated, now, name)
  -- Claims and enqueues read this field anyway, and look at the set only if the field exists.
  call('HSET', meta, 'has_repeated', 1)
end

-- Return true if this first try arrives after its own repetition.
local function is_overtaken(name)
  return call('EXISTS', repeated) == 1 and call('ZSCORE', repeated, name) ~= false
end

-- The same for calls that seldom occur. Notes a repetition.
local function is_void(name)
  if is_again then note_repeated(name) end
  return not is_again and is_overtaken(name)
end
