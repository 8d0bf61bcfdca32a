-- needs: draining, ending
-- Cancel what waits; ask the holder of what is inflight to stop.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, then the ids
-- result  per id: its state, or -1 not found, -2 has ended otherwise

local function cancel_waiting(job)
  append_row(job, OUTCOME_CANCELLED, CANCELLED, now)
  if job.head[KEY] then call('HDEL', waiting_key, job.head[KEY]) end
  leave_line(job)
  call('HDEL', waiting_job, job.id)
  finish(job, CANCELLED, now)
  return CANCELLED
end

local function cancel(id)
  local job = load(waiting_job, id)
  if job then return cancel_waiting(job) end
  job = load(active_job, id)
  if job then
    set_more(job, IS_CANCEL_WANTED, true)
    call('HSET', active_job, id, packed(job))
    return INFLIGHT
  end
  job = load(finished_job, id)
  if not job then return -1 end
  return job.state == CANCELLED and CANCELLED or -2
end

local answers = {}
for n = 3, #ARGV do answers[n - 2] = cancel(ARGV[n]) end
close_up()
return answers
