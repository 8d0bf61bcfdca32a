-- Change the queue's settings. They are merged here, so that changes of different settings at the same time all hold.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, 4 a declaration behind a plus sign or nothing, then names and values; an empty
--         value removes a setting
-- result  nothing
define('configure', {'allow-oom'}, function(keys, args)
  local declaration = args[4] ~= '' and string.sub(args[4], 2)
  if is_void(args[3]) or (declaration and call('HGET', settings, 'declaration') == declaration) then return false end
  if declaration then call('HSET', settings, 'declaration', declaration) end
  for n = 5, #args, 2 do
    if args[n + 1] == '' then call('HDEL', settings, args[n]) else call('HSET', settings, args[n], args[n + 1]) end
  end
  is_stirred = true
  wake()
  return false
end)

-- Cancel a waiting job, or ask the holder of an inflight job to stop. Returns the job's state; nil if it is neither.
local function cancel_unended(id, only_waiting)
  local job = load(waiting_job, id)
  if job then
    append_row(job, OUTCOME_CANCELLED, CANCELLED, now)
    if job.head[KEY] then call('HDEL', waiting_key, job.head[KEY]) end
    leave_line(job)
    call('HDEL', waiting_job, id)
    finish(job, CANCELLED, now)
    return CANCELLED
  end
  job = load(active_job, id)
  if job and not only_waiting then
    set_more(job, CANCEL_REQUESTED, true)
    call('HSET', active_job, id, packed(job))
  end
  return job and INFLIGHT
end

-- Cancel waiting jobs. Ask the holders of inflight jobs to stop.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 1 if only waiting jobs are meant, then the ids
-- result  {0, per id its state or an error}
define('cancel', {'allow-oom'}, function(keys, args)
  return answer_each(args, 4, 1, function(id)
    local state = cancel_unended(id, args[3] == '1')
    if state then return state end
    local job = load(finished_job, id)
    if not job then return NOT_FOUND end
    return job.state == CANCELLED and CANCELLED or FINISHED
  end)
end)

-- Do the same for the jobs of keys.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, 4 1 if only waiting jobs are meant, then the keys
-- result  {0, per key the number of jobs}
define('cancel_keys', {'allow-oom'}, function(keys, args)
  if is_void(args[3]) then return {0} end
  -- The number of waiting jobs of a key that this call has cancelled. An earlier try of it may have done so. A job that came
  -- after that try stays.
  local ended = {}
  for _, id in ipairs(is_again and call('ZRANGEBYSCORE', cancelled, now, now) or {}) do
    local job = load(finished_job, id)
    if job.head[KEY] and not more(job, MERGED_INTO) then ended[job.head[KEY]] = 1 end
  end
  return answer_each(args, 5, 1, function(key)
    local count = ended[key] or 0
    for _, index in ipairs({ended[key] and '' or waiting_key, args[4] == '1' and '' or active_key}) do
      local id = index ~= '' and call('HGET', index, key)
      if id then
        cancel_unended(id)
        count = count + 1
      end
    end
    ended[key] = 0
    return count
  end)
end)

-- Remove a damaged job, which cannot be loaded, and keep its bytes. Does nothing if other bytes are stored now. What names the
-- job in `ready` and `active` is removed when it is met.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 the hash for damaged jobs, 4 id, 5 its bytes, then its keys
-- result  {0, 1 if it was removed}
define('set_aside', {'allow-oom'}, function(keys, args)
  local id, is_removed = args[4], 0
  for _, family in ipairs({waiting_job, active_job, finished_job}) do
    if call('HGET', family, id) == args[5] then
      call('HSET', args[3], id, args[5])
      call('HDEL', family, id)
      for _, line in ipairs({waiting, scheduled, jobs, done, dead, cancelled}) do call('ZREM', line, id) end
      is_removed = 1
    end
  end
  for n = 6, #args do
    for _, index in ipairs({waiting_key, active_key}) do
      if call('HGET', index, args[n]) == id then call('HDEL', index, args[n]) end
    end
    unblock(args[n])
  end
  wake()
  return {0, is_removed}
end)

-- Make dead jobs wait again.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 run_at, 4 1 if the counts of attempts and stalls stay, then the ids
-- result  {0, per id its state or an error}
define('requeue', {'allow-oom'}, function(keys, args)
  return answer_each(args, 5, 1, function(id)
    local job = load(finished_job, id)
    if not job then
      job = load(waiting_job, id) or load(active_job, id)
      if not job then return NOT_FOUND end
      -- An earlier try of this call may have requeued it.
      return is_again and is_requeued_now(job) and state_of(job) or NOT_DEAD
    end
    if job.state ~= DEAD then return NOT_DEAD end
    local head, key = job.head, job.head[KEY]
    if key and call('HEXISTS', waiting_key, key) == 1 then return KEY_WAITS end
    call('HDEL', finished_job, id)
    call('ZREM', dead, id)
    head[RUN_AT] = tonumber(args[3])
    if args[4] ~= '1' then head[ATTEMPTS], head[STALLS] = 0, 0 end
    job.finished_at = 0
    local is_blocked = key and call('HEXISTS', active_key, key) == 1
    append_row(job, REQUEUED, is_blocked and BLOCKED or waiting_state(head[RUN_AT]), now)
    if key then call('HSET', waiting_key, key, id) end
    if is_blocked then block(job) else line_up(job) end
    return state_of(job)
  end)
end)
