-- needs: ending
-- Dead jobs get another chance.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 whether it is sent again (1), then the ids
-- result  per id: its state, or -1 not found, -2 not dead, -3 another job of its key waits already
local is_again = ARGV[3] == '1'

-- An earlier try of this call may have brought it there.
local function was_requeued(job)
  local head = job.head
  return is_again and head[RUN_AT] == now and head[ATTEMPTS] == 0 and head[STALLS] == 0
end

local function start_over(job)
  local head = job.head
  head[ATTEMPTS], head[STALLS], head[RUN_AT] = 0, 0, now
  job.finished_at = 0
end

local function requeue(id)
  local job = load(finished_job, id)
  if not job then
    job = load(waiting_job, id)
    if job and was_requeued(job) then return job.state end
    return (job or call('HEXISTS', active_job, id) == 1) and -2 or -1
  end
  if job.state ~= DEAD then return -2 end
  local key = job.head[KEY]
  if key and call('HEXISTS', waiting_key, key) == 1 then return -3 end
  call('HDEL', finished_job, id)
  call('ZREM', dead, id)
  start_over(job)
  local is_blocked = key and call('HEXISTS', active_key, key) == 1
  append_row(job, REQUEUED, is_blocked and BLOCKED or WAITING, now)
  if key then call('HSET', waiting_key, key, id) end
  if is_blocked then
    block(job)
    return BLOCKED
  end
  line_up(job)
  return WAITING
end

local answers = {}
for n = 4, #ARGV do answers[n - 3] = requeue(ARGV[n]) end
close_up()
return answers
