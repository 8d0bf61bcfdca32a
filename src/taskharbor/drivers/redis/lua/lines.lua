-- The lines of waiting jobs. Every waiting job is in `waiting`. Jobs that may be claimed are in `ready`, one line per type. Jobs
-- that are not yet due are in `scheduled`.

local function type_prefix(name)
  return struct.pack('>I2', #name) .. name
end

local function ready_member(job)
  local head = job.head
  local run_at = head[RUN_AT]
  local high = math.floor(run_at / 4294967296) + 2097152
  local place = struct.pack(PLACE, LOWEST_PRIORITY - head[PRIORITY], high, run_at % 4294967296, job.seq)
  return type_prefix(head[TYPE]) .. place .. job.id
end

-- Return priority, run_at and number of a place that begins at `at`.
local function place_from(text, at)
  local rank, high, low, seq = struct.unpack(PLACE, text, at)
  return rank, (high - 2097152) * 4294967296 + low, seq
end

-- Instants before 1970 become the first one after it: a negative score marks a blocked job.
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
    call('SADD', types, head[TYPE])
  end
  is_stirred = true
end

local function block(job)
  job.state = BLOCKED
  call('HSET', waiting_job, job.id, packed(job))
  call('ZADD', waiting, -score_of(job), job.id)
end

-- Remove an unchanged job from its line. Its record stays.
local function leave_line(job)
  call('ZREM', waiting, job.id)
  if job.state == READY and call('ZREM', scheduled, job.id) == 0 then
    call('ZREM', ready, ready_member(job))
    if call('EXISTS', ready) == 0 then call('DEL', types) end
  end
end

-- Move up to `limit` due jobs from `scheduled` into their lines. Returns true if there were any.
local function promote(limit)
  local ids = call('ZRANGEBYSCORE', scheduled, '-inf', now, 'LIMIT', 0, limit)
  if #ids == 0 then return false end
  local values = call_with('HMGET', waiting_job, ids)
  local members, names, member = {}, {}, nil
  for n = 1, #ids do
    local is_whole, job = pcall(unpacked, ids[n], values[n])
    if is_whole then is_whole, member = pcall(ready_member, job) end
    -- A damaged job leaves the line and stays until it is repaired.
    if is_whole then
      names[#names + 1] = job.head[TYPE]
      members[2 * #names - 1], members[2 * #names] = 0, member
    end
  end
  call_with('ZADD', ready, members)
  call_with('SADD', types, names)
  call_with('ZREM', scheduled, ids)
  return true
end

-- A claim merges the lines that it may take from, to find the next jobs.

-- Return the lines of these types, or of all types, without lines that are known to be empty. `members` are the next members of a
-- line, as far as they were read from `from` on.
local function lines_of(named, limit)
  local lines, seen = {}, {}
  local names = named or call('SMEMBERS', types)
  local are_there = named and #named > 1 and call_with('SMISMEMBER', types, named)
  for n, name in ipairs(names) do
    if not seen[name] and (not are_there or are_there[n] == 1) then
      local prefix = type_prefix(name)
      lines[#lines + 1] = {
        name = name, prefix = prefix, skip = #prefix + 1, members = {}, at = 0, is_over = false,
        from = '[' .. prefix, to = '(' .. prefix .. '\255\255', -- No rank is as high as that.
        portion = math.ceil(limit / #names) + 1, member = false, rank = 0, run_at = 0, seq = 0,
      }
      seen[name] = true
    end
  end
  return lines
end

-- Return the next member of a line and its place; false at its end. A job that is not due by this caller's clock is passed over,
-- with all later jobs of its rank: a caller whose clock is ahead put them there.
local function step(line)
  while true do
    line.at = line.at + 1
    local member = line.members[line.at]
    if member then
      local rank, run_at, seq = place_from(member, line.skip)
      if run_at <= now then
        line.member, line.rank, line.run_at, line.seq = member, rank, run_at, seq
        return true
      end
      line.has_passed_over = true
      line.from = '[' .. line.prefix .. struct.pack('>I2', rank + 1)
    elseif line.is_over then
      line.is_empty = not line.has_passed_over
      return false
    end
    line.members = call('ZRANGEBYLEX', ready, line.from, line.to, 'LIMIT', 0, line.portion)
    line.at = 0
    line.is_over = #line.members < line.portion
    if #line.members > 0 then line.from = '(' .. line.members[#line.members] end
  end
end

local function comes_before(one, other)
  if one.rank ~= other.rank then return one.rank < other.rank end
  if one.run_at ~= other.run_at then return one.run_at < other.run_at end
  return one.seq < other.seq
end

-- Move the line at `at` down to its place in the heap, so that no line comes before the line above it.
local function sink(lines, at)
  local line, count = lines[at], #lines
  while 2 * at <= count do
    local below = 2 * at
    if below < count and comes_before(lines[below + 1], lines[below]) then below = below + 1 end
    if not comes_before(lines[below], line) then break end
    lines[at] = lines[below]
    at = below
  end
  lines[at] = line
end

-- Return the first jobs of some lines, up to `limit`, in order: their members of `ready`, and their ids.
local function first_in_line(lines, limit)
  local members, ids, heap = {}, {}, {}
  for _, line in ipairs(lines) do
    if step(line) then heap[#heap + 1] = line end
  end
  for n = math.floor(#heap / 2), 1, -1 do sink(heap, n) end
  while #ids < limit and #heap > 0 do
    local line = heap[1]
    members[#members + 1] = line.member
    ids[#ids + 1] = string.sub(line.member, line.skip + PLACE_SIZE)
    if not step(line) then
      heap[1] = heap[#heap]
      heap[#heap] = nil
    end
    if #heap > 1 then sink(heap, 1) end
  end
  return members, ids
end

-- The usual case: one line, whose next jobs are all of one rank and due. Takes them and returns their ids, or nil in any other
-- case.
local function take_in_a_row(line, limit)
  local members = call('ZRANGEBYLEX', ready, line.from, line.to, 'LIMIT', 0, limit)
  local count, skip = #members, line.skip
  if count == 0 then
    call('SREM', types, line.name)
    return {}
  end
  local first_rank = place_from(members[1], skip)
  local last_rank, last_run_at = place_from(members[count], skip)
  if first_rank ~= last_rank or last_run_at > now then return nil end
  call('ZREMRANGEBYLEX', ready, '[' .. members[1], '[' .. members[count])
  for n = 1, count do members[n] = string.sub(members[n], skip + PLACE_SIZE) end
  return members
end

-- Take the next jobs of these types (without types: of any type) out of their lines, up to `limit`. Returns their ids, in order.
local function take(named, limit)
  local lines = lines_of(named, limit)
  local in_a_row = #lines == 1 and take_in_a_row(lines[1], limit)
  if in_a_row then return in_a_row end
  local members, ids = first_in_line(lines, limit)
  call_with('ZREM', ready, members)
  local empty = {}
  for _, line in ipairs(lines) do
    if line.is_empty then empty[#empty + 1] = line.name end
  end
  call_with('SREM', types, empty)
  return ids
end
