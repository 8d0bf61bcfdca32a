-- needs: keyed, closing
-- How leases end, and what follows from that.

-- Log the lease and take it away; when it ended. The job is nowhere until `finish` or `go_back`.
local function end_lease(job, outcome, state, error_type, error_message)
  local head = job.head
  local ended_at = math.max(now, job.reserved_at)
  note_end(math.min(ended_at, job.expires_at))
  append_row(job, outcome, state, ended_at, error_type, error_message)
  call('ZREM', active, active_member(job.id, job.worker))
  call('HDEL', active_job, job.id)
  if head[KEY] then call('HDEL', active_key, head[KEY]) end
  if more(job, HAS_PROGRESS) then
    job.rest = content(job)
    set_more(job, HAS_PROGRESS, nil)
  end
  set_more(job, IS_CANCEL_WANTED, nil)
  job.token, job.worker, job.expires_at, job.reserved_at = nil, nil, nil, nil
  if w then is_stirred = true end
  return ended_at
end

local ENDED = {[DONE] = done, [DEAD] = dead, [CANCELLED] = cancelled}
local TOTALS = {[DONE] = 'done_total', [DEAD] = 'dead_total', [CANCELLED] = 'cancelled_total'}

local function put_away(job, state, finished_at)
  job.state = state
  job.finished_at = finished_at
  call('HSET', finished_job, job.id, packed(job))
  call('ZADD', ENDED[state], finished_at, job.id)
  call('HINCRBY', meta, TOTALS[state], 1)
end

-- A job that died is told of in another queue, which may live on another server: so the step that makes it dead only writes
-- down what is to be told, under the id it will have there.
local function tell_failure_queue(job)
  local id = deaths == 0 and failure_id or string.format('%s-%d', failure_id, deaths)
  deaths = deaths + 1
  local address = cmsgpack.pack({id, job.id, failure_queue, now})
  call('RPUSH', outbox, struct.pack('>I4', #address) .. address .. packed(job))
end

local function finish(job, state, finished_at)
  put_away(job, state, finished_at)
  if job.head[KEY] then unblock(job.head[KEY]) end
  if state == DEAD and failure_queue then tell_failure_queue(job) end
end

-- The blocked job's wishes go into the one that goes back to waiting.
local function absorb(survivor, blocked)
  leave_line(blocked)
  call('HDEL', waiting_job, blocked.id)
  apply_update(survivor, blocked, more(blocked, FLAGS) or DEFAULT_FLAGS)
  append_row(blocked, MERGED, CANCELLED, now)
  set_more(blocked, MERGED_INTO, survivor.id)
  put_away(blocked, CANCELLED, now)
end

local function go_back(job)
  local key = job.head[KEY]
  if key then
    local blocked = call('HGET', waiting_key, key)
    if blocked then absorb(job, load(waiting_job, blocked)) end
    call('HSET', waiting_key, key, job.id)
  end
  line_up(job)
end

local function waiting_state(run_at)
  return run_at > now and SCHEDULED or WAITING
end

local function is_spent(head)
  return head[ATTEMPTS] + head[STALLS] >= head[MAX_ATTEMPTS]
    or (head[MAX_STALLS] > 0 and head[STALLS] >= head[MAX_STALLS])
end

local LATE_TYPE = 'LeaseExpired'
local LATE_MESSAGE = 'the lease expired before the job was settled (worker lost or stalled)'

local function expire(job)
  local head = job.head
  head[STALLS] = head[STALLS] + 1
  local state = waiting_state(head[RUN_AT])
  if more(job, IS_CANCEL_WANTED) then
    state = CANCELLED
  elseif is_spent(head) then
    state = DEAD
  end
  local ended_at = end_lease(job, EXPIRED, state, LATE_TYPE, LATE_MESSAGE)
  if state == DEAD then set_more(job, LAST_ERROR, LATE_TYPE .. ': ' .. LATE_MESSAGE) end
  if state == DEAD or state == CANCELLED then
    finish(job, state, ended_at)
  else
    go_back(job)
  end
end

-- End up to `limit` leases that are over, in portions. How many.
local function sweep(limit)
  local ended = 0
  while ended < limit do
    local members = call('ZRANGEBYSCORE', active, '-inf', now, 'LIMIT', 0, math.min(100, limit - ended))
    if #members == 0 then break end
    if ended == 0 then know_settings() end
    for n = 1, #members do expire(load(active_job, id_in(members[n]))) end
    ended = ended + #members
  end
  return ended
end
