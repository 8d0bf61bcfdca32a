-- Jobs with a key: at most one waits and one is inflight. Flags say which fields of the waiting job a newer request changes. See
-- UPDATE in layout.lua.
local DEFAULT_FLAGS = {true, 'no', false, false, false}

-- Change a job by another request for the same key, according to the flags.
local function apply_update(target, source, flags)
  local old, new = target.head, source.head
  local is_content, how, is_retry, resets_counts, is_priority = unpack(flags)
  if is_content then
    old[TYPE], old[BODY_SIZE], old[PAYLOAD_SIZE] = new[TYPE], new[BODY_SIZE], new[PAYLOAD_SIZE]
    target.rest = content(source)
  end
  if how == 'yes' then old[RUN_AT] = new[RUN_AT] end
  if how == 'later' then old[RUN_AT] = math.max(old[RUN_AT], new[RUN_AT]) end
  if how == 'earlier' then old[RUN_AT] = math.min(old[RUN_AT], new[RUN_AT]) end
  if is_retry then
    old[MAX_ATTEMPTS], old[MAX_STALLS] = new[MAX_ATTEMPTS], new[MAX_STALLS]
    set_more(target, BACKOFF_MIN, more(source, BACKOFF_MIN) or nil)
    set_more(target, BACKOFF_MAX, more(source, BACKOFF_MAX) or nil)
  end
  if resets_counts then old[ATTEMPTS], old[STALLS] = 0, 0 end
  if is_priority then old[PRIORITY] = new[PRIORITY] end
end

-- Return the flags of a blocked job after one more request. No request is dropped.
local function gathered(kept, newer)
  local run_at = newer[2] == 'no' and kept[2] or newer[2]
  return {kept[1] or newer[1], run_at, kept[3] or newer[3], kept[4] or newer[4], kept[5] or newer[5]}
end

-- Enqueue onto the one job that waits for this key.
local function update_waiting(job, newer, flags)
  if job.state == BLOCKED then
    apply_update(job, newer, flags)
    set_more(job, UPDATE, gathered(more(job, UPDATE) or DEFAULT_FLAGS, flags))
    block(job)
  else
    leave_line(job)
    apply_update(job, newer, flags)
    line_up(job)
  end
end

-- The inflight job of the key has ended: its blocked job may run.
local function unblock(key)
  local id = call('HGET', waiting_key, key)
  if not id or call('HEXISTS', active_key, key) == 1 then return end
  local job = load(waiting_job, id)
  if job.state == BLOCKED then line_up(job) end
end

-- Acceptance of a new job, from any caller.

-- Another job's idempotency key leads to this one.
local function lead_here(idempotency_key, job)
  call('HSET', accepted, idempotency_key, job.id)
  local others = call('HGET', led_here, job.id)
  others = others and cmsgpack.unpack(others) or {}
  others[#others + 1] = idempotency_key
  call('HSET', led_here, job.id, cmsgpack.pack(others))
end

-- Store a job with an unknown id by the contract's other rules. Returns 0, or the id of the job that will do its work.
local function accept(job)
  local idempotency_key, key = more(job, IDEMPOTENCY_KEY), job.head[KEY]
  local known = idempotency_key and call('HGET', accepted, idempotency_key)
  if known then return known end
  local flags = more(job, UPDATE) or DEFAULT_FLAGS
  if key then
    local other = call('HGET', waiting_key, key)
    if other then
      local waits = load(waiting_job, other)
      update_waiting(waits, job, flags)
      if idempotency_key then lead_here(idempotency_key, waits) end
      return other
    end
    call('HSET', waiting_key, key, job.id)
  end
  call('ZADD', jobs, job.seq, job.id)
  if idempotency_key then call('HSET', accepted, idempotency_key, job.id) end
  if key and call('HEXISTS', active_key, key) == 1 then
    set_more(job, UPDATE, flags)
    block(job)
  else
    line_up(job)
  end
  return 0
end
