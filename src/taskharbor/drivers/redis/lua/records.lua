-- needs: keys
-- The stored job: one string, so that a move from one family to the other is the move of one field.
--
--   lease    only while inflight: that it is, when the lease expires, when it began, length of the worker's name, the worker's
--            name
--   token    only while inflight, 24 bytes
--   front    state; fence; number of the first row in the entry of the log that has its last row, 0 where there is none; when
--            it finished, or 0. While inflight these are as they were when it was claimed
--   base     seq, its number in the order of acceptance; length of the head; whether it is plain
--   head     what else transitions look at: an array by the places below, packed
--   body     codec, headers and timeout, opaque here; empty where all are the default
--   payload  as it came
--   tail     progress of a job that is inflight, result of one that is done
--   grain    one byte that differs from job to job. Lua 5.1, which servers run, looks at every eighth byte or so of a long string
--            and always at the last, to tell it from others; jobs that are much alike would be compared byte by byte
--
-- A claim puts a lease in front; an ack takes it away and changes the front behind it. The rest is carried along unread.
local FRONT, FRONT_SIZE = '>I1I4I8I8', 21
local FRONT_AND_BASE, HEAD_AT = '>I1I4I8I8I8I4I1', 35
local PLAIN_AT = 34
local LEASE = '>I1I8I8I2'
local TOKEN_SIZE = 24
local RUN_AT, PRIORITY, ATTEMPTS, STALLS, MAX_ATTEMPTS, MAX_STALLS = 1, 2, 3, 4, 5, 6
local CREATED_AT, TYPE, KEY, BODY_SIZE, PAYLOAD_SIZE, MORE = 7, 8, 9, 10, 11, 12
-- KEY and MORE are false where there is none; a job with neither is plain. MORE is what few jobs have, a map by these names.
local LAST_ERROR, FAILED_AT, FLAGS, IS_CANCEL_WANTED = 'e', 'f', 'u', 'c'
local MERGED_INTO, HAS_PROGRESS, HAS_RESULT, IDEMPOTENCY_KEY, SETTLED = 'm', 'p', 'r', 'i', 't'
local BACKOFF_MIN, BACKOFF_MAX = 'b', 'B'

-- States of a stored job. Whether one that waits is due is for the reader's clock to say.
local WAITING, BLOCKED, INFLIGHT, DONE, DEAD, CANCELLED = 1, 2, 3, 4, 5, 6
local SCHEDULED = 0  -- only in answers and in the log

local function unpacked(id, value)
  local job = {id = id}
  local at, head_size, worker_size, _ = 1, nil, nil, nil
  local is_leased = string.byte(value) == INFLIGHT
  if is_leased then
    _, job.expires_at, job.reserved_at, worker_size, at = struct.unpack(LEASE, value)
    job.worker = string.sub(value, at, at + worker_size - 1)
    at = at + worker_size
    job.token = string.sub(value, at, at + TOKEN_SIZE - 1)
    at = at + TOKEN_SIZE
  end
  job.state, job.fence, job.last_row, job.finished_at, job.seq, head_size, _, at = struct.unpack(FRONT_AND_BASE, value, at)
  if is_leased then
    job.state = INFLIGHT
    job.fence = job.fence + 1
  end
  _, job.head = cmsgpack.unpack_one(value, at - 1)
  job.rest = string.sub(value, at + head_size, -2)
  job.grain = string.sub(value, -1)
  return job
end

-- Without the token; empty where the job is not inflight.
local function packed_lease(job)
  if job.state ~= INFLIGHT then return '' end
  return struct.pack(LEASE, INFLIGHT, job.expires_at, job.reserved_at, #job.worker) .. job.worker
end

local function packed(job)
  local head = job.head
  local packed_head = cmsgpack.pack(head)
  local is_plain = not head[KEY] and not head[MORE]
  local lease, state, fence = '', job.state, job.fence
  if state == INFLIGHT then
    lease = packed_lease(job) .. job.token
    state, fence = WAITING, fence - 1
  end
  local front = struct.pack(
    FRONT_AND_BASE, state, fence, job.last_row, job.finished_at, job.seq, #packed_head, is_plain and 1 or 0
  )
  return lease .. front .. packed_head .. job.rest .. (job.grain or string.char(job.seq % 256))
end

-- What stands before the number of a job that nothing has happened to.
local NEW_FRONT = struct.pack(FRONT, WAITING, 0, 0, 0)

local function load(family, id)
  local value = call('HGET', family, id)
  return value and unpacked(id, value)
end

local function more(job, name)
  local map = job.head[MORE]
  return map and map[name]
end

local function set_more(job, name, value)
  local map = job.head[MORE]
  if value ~= nil then
    if not map then
      map = {}
      job.head[MORE] = map
    end
    map[name] = value
  elseif map then
    map[name] = nil
    -- An empty table would be packed as an array.
    if next(map) == nil then job.head[MORE] = false end
  end
end

-- Body and payload, without what may come behind them.
local function content(job)
  return string.sub(job.rest, 1, job.head[BODY_SIZE] + job.head[PAYLOAD_SIZE])
end

-- How a place in line begins. The length keeps a type apart from any other that begins like it.
local function type_prefix(name)
  return struct.pack('>I2', #name) .. name
end

-- Whether any of these ids has to be written in another way to be part of a member.
local function is_one_special(ids)
  local all = table.concat(ids)
  return (string.find(all, ':', 1, true) or string.find(all, '%', 1, true)) ~= nil
end

-- Seed 002's member. A colon in an id must not be taken for the one behind it.
local function active_member(id, worker)
  if string.find(id, ':', 1, true) or string.find(id, '%', 1, true) then
    id = string.gsub(id, '[%%:]', {['%'] = '%25', [':'] = '%3A'})
  end
  return id .. ':' .. worker
end

local function id_in(member)
  local id = string.match(member, '^([^:]*):')
  return (string.gsub(id, '%%(%x%x)', function(code) return string.char(tonumber(code, 16)) end))
end
