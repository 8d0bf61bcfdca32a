-- Where waiting jobs stand. Every one is in `waiting`; those that may be claimed are in `ready`, those yet to come due in
-- `scheduled`.

local function type_prefix(name)
  return struct.pack('>I2', #name) .. name
end

local function ready_member(job)
  local head = job.head
  local place = struct.pack(PLACE, LOWEST_PRIORITY - head[PRIORITY], math.max(head[RUN_AT], 0), job.seq)
  return type_prefix(head[TYPE]) .. place .. job.id
end

-- Instants before 1970 are as good as the first one after; the sign belongs to blocked jobs.
local function score_of(job)
  return math.max(job.head[RUN_AT], 1)
end

local function line_up(job)
  local head = job.head
  job.state = READY
  call('HSET', waiting_job, job.id, packed(job))
  call('ZADD', waiting, score_of(job), job.id)
  if head[RUN_AT] > now then
    call('ZADD', scheduled, head[RUN_AT], job.id)
  else
    call('ZADD', ready, 0, ready_member(job))
  end
  is_stirred = true
end

local function block(job)
  job.state = BLOCKED
  call('HSET', waiting_job, job.id, packed(job))
  call('ZADD', waiting, -score_of(job), job.id)
end

-- Out of whatever line the job, unchanged so far, stands in. Its record stays.
local function leave_line(job)
  call('ZREM', waiting, job.id)
  if job.state == READY and call('ZREM', scheduled, job.id) == 0 then
    call('ZREM', ready, ready_member(job))
  end
end

-- Scheduled jobs whose time has come get in line, up to `limit` of them. Whether there were any.
local function promote(limit)
  local ids = call('ZRANGEBYSCORE', scheduled, '-inf', now, 'LIMIT', 0, limit)
  if #ids == 0 then return false end
  local values = call_with('HMGET', waiting_job, ids)
  local members = {}
  for n = 1, #ids do
    members[2 * n - 1] = 0
    members[2 * n] = ready_member(unpacked(ids[n], values[n]))
  end
  call_with('ZADD', ready, members)
  call_with('ZREM', scheduled, ids)
  return true
end

-- Which jobs are next. `ready` holds one line per type; a claim merges the lines it may take from.

-- The types that have jobs in line, as their members begin.
local function all_prefixes()
  local prefixes, from = {}, '-'
  while true do
    local first = call('ZRANGEBYLEX', ready, from, '+', 'LIMIT', 0, 1)[1]
    if not first then return prefixes end
    local prefix = string.sub(first, 1, 2 + struct.unpack('>I2', first))
    prefixes[#prefixes + 1] = prefix
    -- No rank is as high as that.
    from = '(' .. prefix .. '\255\255'
  end
end

local function prefixes_of(types)
  local prefixes, seen = {}, {}
  for _, name in ipairs(types) do
    if not seen[name] then prefixes[#prefixes + 1] = type_prefix(name) end
    seen[name] = true
  end
  return prefixes
end

local function comes_before(one, other)
  if one.rank ~= other.rank then return one.rank < other.rank end
  if one.run_at ~= other.run_at then return one.run_at < other.run_at end
  return one.seq < other.seq
end

-- Read on in a line. What is not due to this caller is passed over, together with all of its rank that come behind it:
-- somebody whose clock is ahead put them there.
local function read_on(line, found)
  local members = call('ZRANGEBYLEX', ready, line.from, line.to, 'LIMIT', 0, line.portion)
  line.is_over = #members < line.portion
  line.portion = 2 * line.portion
  for n = 1, #members do
    local rank, run_at, seq = struct.unpack(PLACE, members[n], line.skip)
    if run_at > now then
      line.is_over = false
      line.from = '[' .. line.prefix .. struct.pack('>I2', rank + 1)
      line.last = {rank = rank, run_at = run_at, seq = seq}
      return
    end
    line.from = '(' .. members[n]
    line.last = {rank = rank, run_at = run_at, seq = seq, member = members[n], id_at = line.skip + PLACE_SIZE}
    found[#found + 1] = line.last
  end
end

-- The first jobs of some lines, up to `limit`, in order. Each line is read until it comes behind the last of these.
local function first_in_line(prefixes, limit)
  local found, lines = {}, {}
  for n, prefix in ipairs(prefixes) do
    lines[n] = {
      prefix = prefix, skip = #prefix + 1, from = '[' .. prefix, to = '(' .. prefix .. '\255\255', is_over = false,
      portion = math.ceil(limit / #prefixes) + 1,
    }
  end
  repeat
    local is_complete, last = true, found[limit]
    for _, line in ipairs(lines) do
      if not line.is_over and (not last or not line.last or comes_before(line.last, last)) then
        read_on(line, found)
        is_complete = false
      end
    end
    table.sort(found, comes_before)
  until is_complete
  for n = #found, limit + 1, -1 do found[n] = nil end
  return found
end

-- The usual case: one line, whose next jobs are all of one rank and due. Takes them, or says nil where it is not that simple.
local function take_in_a_row(prefix, limit)
  local members = call('ZRANGEBYLEX', ready, '[' .. prefix, '(' .. prefix .. '\255\255', 'LIMIT', 0, limit)
  local count, skip = #members, #prefix + 1
  if count == 0 then return {} end
  local first_rank = struct.unpack(PLACE, members[1], skip)
  local last_rank, last_run_at = struct.unpack(PLACE, members[count], skip)
  if first_rank ~= last_rank or last_run_at > now then return nil end
  call('ZREMRANGEBYLEX', ready, '[' .. members[1], '[' .. members[count])
  for n = 1, count do members[n] = string.sub(members[n], skip + PLACE_SIZE) end
  return members
end

-- Take the next jobs out of these lines, up to `limit`: their ids, in order.
local function take(prefixes, limit)
  local ids = #prefixes == 1 and take_in_a_row(prefixes[1], limit)
  if ids then return ids end
  ids = {}
  local members = {}
  for n, one in ipairs(first_in_line(prefixes, limit)) do
    members[n] = one.member
    ids[n] = string.sub(one.member, one.id_at)
  end
  call_with('ZREM', ready, members)
  return ids
end
