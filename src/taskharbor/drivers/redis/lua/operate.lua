-- Replace the queue's settings.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now (unused), then names and values
-- result  nothing
define('configure', {'allow-oom'}, function(keys, args)
  call('DEL', settings)
  call('HSET', settings, unpack(args, 3))
  is_stirred = true
  wake()
  return false
end)

-- Cancel waiting jobs. Ask the holders of inflight jobs to stop.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, then the ids
-- result  {0, per id its state or an error}
define('cancel', {'allow-oom'}, function(keys, args)
  return answer_each(args, 3, 1, function(id)
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
    if job then
      set_more(job, CANCEL_REQUESTED, true)
      call('HSET', active_job, id, packed(job))
      return INFLIGHT
    end
    job = load(finished_job, id)
    if not job then return NOT_FOUND end
    return job.state == CANCELLED and CANCELLED or FINISHED
  end)
end)

-- Make dead jobs ready again.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, then the ids
-- result  {0, per id its state or an error}
define('requeue', {'allow-oom'}, function(keys, args)
  return answer_each(args, 3, 1, function(id)
    local job = load(finished_job, id)
    if not job then
      job = load(waiting_job, id)
      local head = job and job.head
      -- An earlier try of this call may have requeued it.
      if is_again and head and head[RUN_AT] == now and head[ATTEMPTS] + head[STALLS] == 0 then return job.state end
      return (job or call('HEXISTS', active_job, id) == 1) and NOT_DEAD or NOT_FOUND
    end
    if job.state ~= DEAD then return NOT_DEAD end
    local head, key = job.head, job.head[KEY]
    if key and call('HEXISTS', waiting_key, key) == 1 then return KEY_WAITS end
    call('HDEL', finished_job, id)
    call('ZREM', dead, id)
    head[ATTEMPTS], head[STALLS], head[RUN_AT] = 0, 0, now
    job.finished_at = 0
    local is_blocked = key and call('HEXISTS', active_key, key) == 1
    append_row(job, REQUEUED, is_blocked and BLOCKED or READY, now)
    if key then call('HSET', waiting_key, key, id) end
    if is_blocked then block(job) else line_up(job) end
    return job.state
  end)
end)
