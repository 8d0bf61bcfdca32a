-- needs: records
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
  job.state = WAITING
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
  if job.state == WAITING and call('ZREM', scheduled, job.id) == 0 then
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
