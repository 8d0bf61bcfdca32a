-- Where waiting jobs stand. Every one is in `waiting`; those that may be claimed are in `ready`, those yet to come due in
-- `scheduled`.

-- Sorted byte by byte this is: by type, then priority descending, run_at, acceptance.
local function ready_member(job)
  local head = job.head
  return type_prefix(head[TYPE])
    .. struct.pack('>I2I8I8', 32767 - head[PRIORITY], math.max(head[RUN_AT], 0), job.seq)
    .. job.id
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
  local values = ask_with('HMGET', waiting_job, ids)
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

local PLACE = '>I2I8I8'

local function prefix_of(member)
  return string.sub(member, 1, 2 + struct.unpack('>I2', member))
end

-- The types that have jobs in line, as their members begin.
local function all_prefixes()
  local prefixes, from = {}, '-'
  while true do
    local first = call('ZRANGEBYLEX', ready, from, '+', 'LIMIT', 0, 1)[1]
    if not first then return prefixes end
    local prefix = prefix_of(first)
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

-- Read on in a line: its next member, with its place. False at its end. What is not due to this caller is passed over,
-- together with all of its rank that come behind it: somebody whose clock is ahead put them there.
local function step(line)
  while true do
    line.at = line.at + 1
    local member = line.members[line.at]
    if member then
      local rank, run_at, seq = struct.unpack(PLACE, member, line.skip)
      if run_at <= now then
        line.member, line.rank, line.run_at, line.seq = member, rank, run_at, seq
        return true
      end
      line.from = '[' .. line.prefix .. struct.pack('>I2', rank + 1)
    elseif line.is_over then
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

local function opened_lines(prefixes, limit)
  local lines = {}
  local portion = #prefixes == 1 and limit or math.ceil(limit / #prefixes) + 1
  for _, prefix in ipairs(prefixes) do
    local line = {
      prefix = prefix, skip = #prefix + 1, from = '[' .. prefix, to = '(' .. prefix .. '\255\255',
      portion = portion, members = {}, at = 0, is_over = false,
    }
    if step(line) then lines[#lines + 1] = line end
  end
  return lines
end

-- The usual case: members of one type, the first of its line, all of one rank or none too early. Takes them, or says nil where
-- it is not that simple.
local function take_in_a_row(prefix, members)
  local count = #members
  if count == 0 then return {} end
  local skip = #prefix + 1
  local first_rank = struct.unpack(PLACE, members[1], skip)
  local last_rank, last_run_at = struct.unpack(PLACE, members[count], skip)
  if first_rank ~= last_rank or last_run_at > now then return nil end
  call('ZREMRANGEBYLEX', ready, '[' .. members[1], '[' .. members[count])
  local ids = {}
  for n = 1, count do ids[n] = string.sub(members[n], skip + 18) end
  return ids
end

-- Let the line at `at` sink to its place in the heap: no line comes before the one above it.
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

-- The same from any number of lines.
local function take_merged(prefixes, limit)
  local members, ids = {}, {}
  local lines = opened_lines(prefixes, limit)
  for n = math.floor(#lines / 2), 1, -1 do sink(lines, n) end
  while #ids < limit and #lines > 0 do
    local line = lines[1]
    members[#members + 1] = line.member
    ids[#ids + 1] = string.sub(line.member, line.skip + 18)
    if #ids < limit then
      if not step(line) then
        local last = table.remove(lines)
        if last ~= line then lines[1] = last end
      end
      if #lines > 0 then sink(lines, 1) end
    end
  end
  call_with('ZREM', ready, members)
  return ids
end

-- Take the next jobs of these types out of their lines, up to `limit`: their ids, in order.
local function take(prefixes, limit)
  if #prefixes == 0 then return {} end
  if #prefixes > 1 then return take_merged(prefixes, limit) end
  local prefix = prefixes[1]
  local members = call('ZRANGEBYLEX', ready, '[' .. prefix, '(' .. prefix .. '\255\255', 'LIMIT', 0, limit)
  return take_in_a_row(prefix, members) or take_merged(prefixes, limit)
end

-- The same of any type. Most queues have one, which the first and the last in line tell.
local function take_any(limit)
  local members = call('ZRANGEBYLEX', ready, '-', '+', 'LIMIT', 0, limit)
  local last = members[#members]
  if not last then return {} end
  if #members == limit then last = call('ZREVRANGEBYLEX', ready, '+', '-', 'LIMIT', 0, 1)[1] end
  local prefix = prefix_of(members[1])
  if string.sub(last, 1, #prefix) ~= prefix then return take(all_prefixes(), limit) end
  return take_in_a_row(prefix, members) or take_merged({prefix}, limit)
end
