-- Stored jobs as Lua tables, and back; see layout.lua.

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
  job.state, job.fence, job.last_row, job.finished_at, head_size, _, at = struct.unpack(FRONT, value, at)
  if is_leased then
    job.state = INFLIGHT
    job.fence = job.fence + 1
  end
  _, job.head = cmsgpack.unpack_one(value, at - 1)
  job.rest = string.sub(value, at + head_size, -1 - SEQ_SIZE)
  job.seq = struct.unpack(SEQ, value, #value - SEQ_SIZE + 1)
  return job
end

-- The lease without its token; empty if the job is not inflight.
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
    state, fence = READY, fence - 1
  end
  local front = struct.pack(FRONT, state, fence, job.last_row, job.finished_at, #packed_head, is_plain and 1 or 0)
  return lease .. front .. packed_head .. job.rest .. struct.pack(SEQ, job.seq)
end

local function load(family, id)
  local value = call('HGET', family, id)
  return value and unpacked(id, value)
end

-- Returns nil for a job that is damaged or not stored. It must not stop a call that has begun to change others.
local function load_whole(family, id)
  local is_whole, job = pcall(load, family, id)
  return is_whole and job or nil
end

local function more(job, name)
  local map = job.head[MORE]
  return map and map[name]
end

local function set_more(job, name, value)
  local map = job.head[MORE] or {}
  map[name] = value
  -- An empty table would be packed as an array.
  job.head[MORE] = next(map) ~= nil and map
end

-- Body and payload, without the tail.
local function content(job)
  return string.sub(job.rest, 1, job.head[BODY_SIZE] + job.head[PAYLOAD_SIZE])
end

-- A member of `active` is an id and what this returns: a colon and the worker's name. A colon in the name is escaped, so the last
-- colon of a member is the one behind the id.
local function behind_id(worker)
  return ':' .. string.gsub(worker, ':', '%%3A')
end

local function id_in(member)
  return string.match(member, '^(.*):')
end
