-- needs: keyed
-- How a new job gets in, whoever brings it.

local function lead_here(idempotency_key, job, is_own)
  call('HSET', accepted, idempotency_key, job.id)
  if is_own then return end
  local others = call('HGET', led_here, job.id)
  others = others and cmsgpack.unpack(others) or {}
  others[#others + 1] = idempotency_key
  call('HSET', led_here, job.id, cmsgpack.pack(others))
end

-- Store one job by the contract's rules, as number `seq`: 0, or the id of the job that was there.
local function accept(seq, id, head, rest)
  if call('ZSCORE', jobs, id) then return id end
  local job = {
    id = id, seq = seq, state = WAITING, fence = 0, last_row = 0, finished_at = 0, head = head, rest = rest,
  }
  local idempotency_key, key = more(job, IDEMPOTENCY_KEY), head[KEY]
  if idempotency_key then
    local known = call('HGET', accepted, idempotency_key)
    if known then return known end
  end
  local flags = more(job, FLAGS) or DEFAULT_FLAGS
  if key then
    local other = call('HGET', waiting_key, key)
    if other then
      local waits = load(waiting_job, other)
      update_waiting(waits, job, flags)
      if idempotency_key then lead_here(idempotency_key, waits, false) end
      return other
    end
    call('HSET', waiting_key, key, id)
  end
  call('ZADD', jobs, job.seq, id)
  if idempotency_key then lead_here(idempotency_key, job, true) end
  if key and call('HEXISTS', active_key, key) == 1 then
    set_more(job, FLAGS, flags)
    block(job)
  else
    line_up(job)
  end
  return 0
end
