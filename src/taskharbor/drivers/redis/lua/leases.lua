-- Ends of leases, and the changes that follow.

-- Errors, and what a lease is told that ended as it should. `leases.py` lists the errors in the same order.
local OK, NOT_FOUND, NOT_INFLIGHT, MISMATCH, TOO_LATE, FINISHED, KEY_WAITS, NOT_DEAD = 0, -1, -2, -3, -4, -5, -6, -7

-- Variables of one call; see define.lua.
local latest_end      -- latest end of a lease in this queue, once one has ended
local failure_id      -- id of the first job for the failure queue; the call's own, so nobody else has it
local deaths          -- number of jobs that died
local max_inflight    -- settings; `read_settings` fetches them
local failure_queue

local function read_settings()
  local found = call('HMGET', settings, 'max_inflight', 'failure_queue')
  max_inflight, failure_queue = found[1], found[2]
end

-- No later lease may begin before the latest end of one, whatever its caller's clock says.
local function note_end(over_at)
  if latest_end == nil then latest_end = tonumber(call('HGET', meta, 'latest_end') or 0) end
  if over_at > latest_end then latest_end = over_at end
end

-- Runs at the end of every call that may have ended leases. Returns the number of moves, if there was one.
local function close_up()
  close_log()
  if latest_end then call('HSET', meta, 'latest_end', latest_end) end
  return wake()
end

-- Returns {0, an answer per item}. Items are in `args` from `first` on, with up to three values each.
local function answer_each(args, first, size, answer)
  local answers = {0}
  for n = first, #args, size do answers[#answers + 1] = answer(args[n], args[n + 1], args[n + 2]) end
  close_up()
  return answers
end

-- Log the lease and remove it; return its end. The job is in no key until `finish` or `go_back`.
local function end_lease(job, outcome, state, failure)
  local head = job.head
  local ended_at = math.max(now, job.reserved_at)
  note_end(math.min(ended_at, job.expires_at))
  append_row(job, outcome, state, ended_at, failure)
  call('ZREM', active, job.id .. behind_id(job.worker))
  call('HDEL', active_job, job.id)
  if head[KEY] then call('HDEL', active_key, head[KEY]) end
  if more(job, PROGRESS) then
    job.rest = content(job)
    set_more(job, PROGRESS, nil)
  end
  set_more(job, CANCEL_REQUESTED, nil)
  job.token, job.worker, job.expires_at, job.reserved_at = nil, nil, nil, nil
  if max_inflight then is_stirred = true end
  return ended_at
end

local TOTALS = {[DONE] = 'done_total', [DEAD] = 'dead_total', [CANCELLED] = 'cancelled_total'}

-- The key of the jobs that ended in this state.
local function ended_in(state)
  return state == DONE and done or state == DEAD and dead or cancelled
end

local function put_away(job, state, finished_at)
  job.state = state
  job.finished_at = finished_at
  call('HSET', finished_job, job.id, packed(job))
  local ended = ended_in(state)
  call('ZADD', ended, finished_at, job.id)
  call('HINCRBY', meta, TOTALS[state], 1)
end

-- Write an entry for the failure queue into the outbox, with the id of the new job there. The failure queue may be on another
-- server, so the step that makes a job dead cannot enqueue there itself.
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

-- Merge the blocked job into the job that goes back to waiting.
local function absorb(survivor, blocked)
  leave_line(blocked)
  call('HDEL', waiting_job, blocked.id)
  apply_update(survivor, blocked, more(blocked, UPDATE) or DEFAULT_FLAGS)
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
  return run_at > now and SCHEDULED or READY
end

-- The state of a job for an answer.
local function state_of(job)
  return job.state == READY and waiting_state(job.head[RUN_AT]) or job.state
end

local function is_spent(head)
  local has_bound = head[MAX_STALLS] > 0
  return head[ATTEMPTS] + (has_bound and 0 or head[STALLS]) >= head[MAX_ATTEMPTS]
    or (has_bound and head[STALLS] >= head[MAX_STALLS])
end

-- One line, then the traceback if there is one.
local function set_last_error(job, failure)
  local text = failure.type
  if failure.message ~= '' then text = text .. ': ' .. failure.message end
  if failure.detail ~= '' then text = text .. '\n' .. failure.detail end
  set_more(job, LAST_ERROR, text)
end

local LATE = {
  type = 'LeaseExpired', message = 'the lease expired before the job was settled (worker lost or stalled)', detail = '',
}

local function expire(job)
  local head = job.head
  head[STALLS] = head[STALLS] + 1
  local state = more(job, CANCEL_REQUESTED) and CANCELLED or is_spent(head) and DEAD or waiting_state(head[RUN_AT])
  local ended_at = end_lease(job, EXPIRED, state, LATE)
  if state == DEAD then set_last_error(job, LATE) end
  if state == DEAD or state == CANCELLED then finish(job, state, ended_at) else go_back(job) end
end

-- End up to `limit` expired leases, in portions. Returns their number.
local function sweep(limit)
  local ended = 0
  while ended < limit do
    local members = call('ZRANGEBYSCORE', active, '-inf', now, 'LIMIT', 0, math.min(100, limit - ended))
    if #members == 0 then break end
    if ended == 0 then read_settings() end
    for n = 1, #members do
      local job = load_whole(active_job, id_in(members[n]))
      -- A damaged job stays stored until it is repaired.
      if job then expire(job) else call('ZREM', active, members[n]) end
    end
    ended = ended + #members
  end
  return ended
end
