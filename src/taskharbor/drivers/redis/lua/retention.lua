-- Remove jobs that have ended, and the idempotency keys that led to them.

local function forget_keys(ids, values)
  local has_others = call('EXISTS', led_here) == 1
  for n = 1, #ids do
    local job = unpacked(ids[n], values[n])
    local own = more(job, IDEMPOTENCY_KEY)
    if own and call('HGET', accepted, own) == job.id then call('HDEL', accepted, own) end
    local others = has_others and call('HGET', led_here, job.id)
    if others then
      call_with('HDEL', accepted, cmsgpack.unpack(others))
      call('HDEL', led_here, job.id)
    end
  end
end

-- `family` is the set of the jobs that ended in the same state.
local function forget(family, ids)
  if #ids == 0 then return end
  if call('EXISTS', accepted) == 1 then forget_keys(ids, call_with('HMGET', finished_job, ids)) end
  call_with('HDEL', finished_job, ids)
  call_with('ZREM', jobs, ids)
  call_with('ZREM', family, ids)
end

-- Remove jobs that have ended, by id.
--
-- KEYS    the queue's
-- ARGV    1 unused, 2 now, then in pairs: id, and the instant at which it must have ended or nothing
-- result  {0, per id the state of the job; plus 10 if it has not ended and stays; or an error}
define('remove', {'allow-oom'}, function(_, args)
  local chosen = {[DONE] = {}, [DEAD] = {}, [CANCELLED] = {}}

  local answers = answer_each(args, 3, 2, function(id, finished_at)
    local job = load(finished_job, id)
    if job and (finished_at == '' or job.finished_at == tonumber(finished_at)) then
      table.insert(chosen[job.state], id)
      return job.state
    end
    job = job or load(waiting_job, id) or load(active_job, id)
    if not job then return NOT_FOUND end
    return 10 + state_of(job)
  end)
  for state, ids in pairs(chosen) do forget(ended_in(state), ids) end
  return answers
end)

-- Apply the queue's retention to ended jobs and to the attempt log.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 the most jobs, 4 the most rows,
--         5 to 7 default retention of done jobs, dead jobs and rows
-- result  {number of removed jobs, number of removed rows}
define('prune', {'allow-oom'}, function(keys, args)
  local said = call('HMGET', settings, 'keep_done_us', 'keep_dead_us', 'keep_attempts_us')
  local FOR_EVER = 'ever'

  -- Return the latest instant of an end that is due now; false if nothing is ever due.
  local function cutoff(n)
    local keep = said[n] or args[4 + n]
    return keep ~= FOR_EVER and now - tonumber(keep)
  end

  local function prune_jobs(family, ended_by, limit)
    if not ended_by or limit <= 0 then return 0 end
    local ids = call('ZRANGEBYSCORE', family, '-inf', ended_by, 'LIMIT', 0, limit)
    forget(family, ids)
    return #ids
  end

  -- The highest number of a removed row: a reader that goes on from a lower number has missed a row.
  local function note_trimmed(number)
    if number > tonumber(call('HGET', meta, 'trimmed') or 0) then
      call('HSET', meta, 'trimmed', string.format('%.0f', number))
    end
  end

  -- Entries are in the order in which they were written. That is the order of their ends, except for the few entries in `late`.
  -- If only a part of an entry is due, the entry stays, and its rows up to `gone` count as gone.
  local function prune_front(ended_by, limit)
    local taken = 0
    local front = gone_up_to()
    while taken < limit do
      local found = call('XRANGE', attempts, '-', '+', 'COUNT', math.min(50, limit - taken))
      local due = {}
      for n = 1, #found do
        local last, value = number_in(found[n][1]), found[n][2][2]
        if taken == limit or struct.unpack(ENTRY, value) > ended_by then break end
        local rows = math.min(rows_in(value), last - front)
        if taken + rows > limit then
          front = last - rows + limit - taken
          taken = limit
          call('HSET', meta, 'gone', string.format('%.0f', front))
          note_trimmed(front)
          break
        end
        due[n] = found[n][1]
        taken = taken + rows
      end
      if #due > 0 then
        call('XDEL', attempts, unpack(due))
        note_trimmed(number_in(due[#due]))
        call('ZREM', late, unpack(due))
      end
      if #due < #found or #found == 0 then break end
    end
    return taken
  end

  -- Each of these rows has its own entry.
  local function prune_late(ended_by, limit)
    if limit <= 0 then return 0 end
    local places = call('ZRANGEBYSCORE', late, '-inf', ended_by, 'LIMIT', 0, limit)
    call_with('XDEL', attempts, places)
    call_with('ZREM', late, places)
    for n = 1, #places do note_trimmed(number_in(places[n])) end
    return #places
  end

  local most = tonumber(args[3])
  local gone = prune_jobs(done, cutoff(1), most)
  gone = gone + prune_jobs(cancelled, cutoff(1), most - gone)
  gone = gone + prune_jobs(dead, cutoff(2), most - gone)

  local rows_gone, ended_by = 0, cutoff(3)
  if ended_by then
    local most_rows = tonumber(args[4])
    rows_gone = prune_front(ended_by, most_rows)
    rows_gone = rows_gone + prune_late(ended_by, most_rows - rows_gone)
    -- The stream itself stays when its last row is removed.
    if rows_gone > 0 and call('XLEN', attempts) == 0 then call('DEL', attempts) end
  end
  call('ZREMRANGEBYSCORE', repeated, '-inf', now - KEEP_FOR)
  if call('EXISTS', ready) == 0 then call('DEL', types) end
  if call('EXISTS', repeated) == 0 then call('HDEL', meta, 'has_repeated') end
  return {gone, rows_gone}
end)
