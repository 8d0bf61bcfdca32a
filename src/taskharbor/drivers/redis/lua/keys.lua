-- A queue's keys, by their names. KEYS of every script, in this order (see keys.py).
local waiting = KEYS[1]        -- zset  job id -> run_at of every waiting job; negative where it is blocked
local active = KEYS[2]         -- zset  id:worker -> when the lease expires
local waiting_job = KEYS[3]    -- hash  job id -> stored job, while it waits
local active_job = KEYS[4]     -- hash  the same while it is inflight
local finished_job = KEYS[5]   -- hash  the same once it has ended
local ready = KEYS[6]          -- zset  type, place in the line and id of every job that may be claimed; all scores 0
local scheduled = KEYS[7]      -- zset  job id -> run_at of those that were not due when they were stored
local jobs = KEYS[8]           -- zset  job id -> number of every job there is, in the order they were accepted
local done = KEYS[9]           -- zset  job id -> when it ended
local dead = KEYS[10]          -- zset
local cancelled = KEYS[11]     -- zset
local waiting_key = KEYS[12]   -- hash  key -> id of the one job that waits for it
local active_key = KEYS[13]    -- hash  key -> id of the one job that is inflight for it
local accepted = KEYS[14]      -- hash  idempotency key -> id of the job it led to
local led_here = KEYS[15]      -- hash  job id -> idempotency keys that led to it and are not its own
local settings = KEYS[16]      -- hash  what an operator said of the queue
local meta = KEYS[17]          -- hash  counters and high-water marks
local attempts = KEYS[18]      -- stream  the attempt log
local late = KEYS[19]          -- zset  number of a row of the log -> its end, of rows that ended before one in front of them
local outbox = KEYS[20]        -- list  jobs that died and have yet to be told of in the failure queue
local repeated = KEYS[21]      -- zset  id of a call that was sent again -> when
local notify = KEYS[22]        -- stream  one entry: the number of the queue's last move, for blocking claims

-- ARGV[1] of every script that moves jobs; empty where nobody is to be told.
local channel = ARGV[1]
-- ARGV[2]: the caller's clock. A script never judges by another.
local now = tonumber(ARGV[2])

local call = redis.call

-- One command with many values, in portions the Lua stack can hold. The sum of what the command answers.
local function call_with(command, key, values)
  local count = #values
  if count == 0 then return 0 end
  if count <= 4000 then return call(command, key, unpack(values)) end
  local sum = 0
  for first = 1, count, 4000 do
    sum = sum + call(command, key, unpack(values, first, math.min(first + 3999, count)))
  end
  return sum
end

-- The same for a command that answers with one value for each given.
local function ask_with(command, key, values)
  if #values <= 4000 then
    return call(command, key, unpack(values))
  end
  local answers = {}
  for first = 1, #values, 4000 do
    local portion = call(command, key, unpack(values, first, math.min(first + 3999, #values)))
    for n = 1, #portion do answers[#answers + 1] = portion[n] end
  end
  return answers
end

-- Whether something may have become runnable. Those who wait are told once, at the end of the script: by a number that grows,
-- so that who remembers the last one it saw can miss nothing.
local is_stirred = false

-- To subscribers of the channel, and to blocking claims.
local function announce(moves)
  if channel == '' then return end
  call('PUBLISH', channel, moves)
  -- Refused where somebody took the counter away and left the stream: blocking claims end a little later by themselves.
  redis.pcall('XADD', notify, 'MAXLEN', 1, moves .. '-0', 'm', '')
end

-- The number of moves where there was one.
local function wake()
  if not is_stirred then return nil end
  local moves = call('HINCRBY', meta, 'moves', 1)
  announce(moves)
  return moves
end

local function server_time()
  local time = call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- A number that grows with everything that is accepted or logged, and is never given twice: the server's own time in
-- microseconds, or one more than the last where that is later. A replica that lost writes and is promoted goes on from its
-- own clock. It orders, and decides nothing else.
local function stamp_after(last)
  return math.max(server_time(), tonumber(last or 0) + 1)
end

local function next_stamp(name)
  return stamp_after(call('HGET', meta, name))
end

-- A counter that gives each number and its digits. To write out sixteen digits costs more than most commands, so the first
-- ten are written once.
local function counting_from(number)
  local low = number % 1000000
  local high = string.format('%.0f', (number - low) / 1000000)
  number = number - 1
  low = low - 1
  return function()
    number = number + 1
    low = low + 1
    if low == 1000000 then
      low = 0
      high = string.format('%.0f', number / 1000000)
    end
    return number, string.format('%s%06d', high, low)
  end
end
