-- Return the first later instant at which a job or the end of a lease comes due, or -1.
local function next_due(since)
  local first = -1
  for _, key in ipairs({waiting, active}) do
    local instant = tonumber(call('ZRANGEBYSCORE', key, '(' .. since, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
    if instant and (first < 0 or instant < first) then first = instant end
  end
  return first
end

-- The version of a queue and the next instant at which something comes due, for a caller that is about to wait.
--
-- KEYS    the queue's
-- ARGV    1 unused, 2 since: the caller knows of instants up to this one
-- result  {moves, first instant after `since` at which a job or the end of a lease comes due, or -1}
define('look', {'no-writes'}, function(_, args)
  return {tonumber(call('HGET', meta, 'moves') or 0), next_due(args[2])}
end)

-- End expired leases, promote due jobs, then lease the next jobs.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 lease_for, 4 limit, 5 worker, 6 token, which is also the name of the call, 7 id for the failure
--         queue, 8 types, packed; empty for all, 9 the server's time when the caller's was `now`, if the call was sent ahead to
--         be run when the queue moves; else empty
-- result  {length of the outbox; number of the queue's moves and next due instant (-1: none), if the claim left no job, else -1
--         twice (also if it was sent ahead and brought jobs); start and expiry of the leases; id, stored job as it waited, ...}
define('reserve', {'allow-oom'}, function(keys, args)
  local lease_for, limit, worker, token = tonumber(args[3]), tonumber(args[4]), args[5], args[6]
  failure_id = args[7]
  local is_sent_ahead = args[9] ~= ''
  if is_sent_ahead then
    -- Still the caller's clock. The server's clock only tells how long the call was blocked.
    now = now + math.max(0, server_time() - tonumber(args[9]))
    args[2] = string.format('%.0f', now)
  end
  local answer = {0, -1, -1, 0, 0}
  local FIRST = 5

  local known = call('HMGET', meta, 'moves', 'latest_end', 'has_repeated')
  if is_again then
    note_repeated(token)
  elseif known[3] and is_overtaken(token) then
    return answer
  end

  sweep(math.max(limit, 1000))
  local was_promoted = promote(10000)

  -- Jobs that an earlier try of this call has leased: the caller gets them now. If it wants fewer, the others go back unspent.
  local function found_again()
    local all = call('HGETALL', active_job)
    for n = 1, #all, 2 do
      local job = unpacked(all[n], all[n + 1])
      if job.token == token then
        if #answer < FIRST + 2 * limit then
          answer[4], answer[5] = job.reserved_at, job.expires_at
          answer[#answer + 1] = all[n]
          answer[#answer + 1] = string.sub(all[n + 1], #packed_lease(job) + TOKEN_SIZE + 1)
        else
          end_lease(job, RELEASED, waiting_state(job.head[RUN_AT]))
          go_back(job)
        end
      end
    end
    return #answer > FIRST
  end

  local function room()
    local said = call('HMGET', settings, 'paused', 'max_inflight')
    if said[1] == '1' then return 0 end
    if not said[2] then return limit end
    -- An expired lease frees its place, even before it is reclaimed.
    return math.min(limit, tonumber(said[2]) - call('ZCOUNT', active, '(' .. args[2], '+inf'))
  end

  local function lease(ids)
    local byte = string.byte
    local values = call_with('HMGET', waiting_job, ids)
    local reserved_at = math.max(now, tonumber(known[2] or 0))
    local expires_at = reserved_at + lease_for
    local granted = struct.pack(LEASE, INFLIGHT, expires_at, reserved_at, #worker) .. worker .. token
    local deadline = string.format('%.0f', expires_at)
    local stored, leases = {}, {}
    local member_end = behind_id(worker)
    for n = 1, #ids do
      -- The caller sets aside what it cannot read.
      local id, value = ids[n], values[n] or ''
      -- The key is now held by the inflight job. Plain jobs have no key.
      local job = byte(value, PLAIN_AT) == 0 and load_whole(waiting_job, id)
      local key = job and job.head[KEY]
      if key then
        call('HDEL', waiting_key, key)
        call('HSET', active_key, key, id)
      end
      stored[2 * n - 1], stored[2 * n] = id, granted .. value
      leases[2 * n - 1], leases[2 * n] = deadline, id .. member_end
      answer[FIRST + 2 * n - 1], answer[FIRST + 2 * n] = id, value
    end
    answer[4], answer[5] = reserved_at, expires_at
    call_with('ZREM', waiting, ids)
    call_with('HDEL', waiting_job, ids)
    call_with('HSET', active_job, stored)
    call_with('ZADD', active, leases)
  end

  if not (is_again and (found_again() or limit == 0)) then
    local count = room()
    local ids = count > 0 and take(args[8] ~= '' and cmsgpack.unpack(args[8]), count) or {}
    if #ids > 0 then lease(ids) end
  end
  -- A caller that begins to wait now does not find these among the scheduled jobs.
  if was_promoted and call('EXISTS', ready) == 1 then is_stirred = true end
  local moves = close_up() or tonumber(known[1] or 0)
  -- The caller of a blocking claim has jobs to begin with, and asks again.
  if is_sent_ahead and #answer > FIRST and deaths == 0 then return answer end
  answer[1] = call('LLEN', outbox)
  if #answer < FIRST + 2 * limit then
    -- A caller that gets fewer jobs than it asked for waits next. Older changes need not wake it.
    answer[2], answer[3] = moves, next_due(args[2])
  end
  return answer
end)

-- Heartbeats: every valid lease lasts until now + lease_for, or longer if it already did.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 lease_for, then per heartbeat id, token, and progress behind a plus sign or nothing
-- result  {0, one per heartbeat}: {expiry of the lease, 1 if a cancel was requested}, or an error
define('extend', {'allow-oom'}, function(keys, args)
  local until_then = now + tonumber(args[3])

  return answer_each(args, 4, 3, function(id, token, progress)
    local job = load(active_job, id)
    if not job then
      local is_known = call('HEXISTS', waiting_job, id) == 1 or call('HEXISTS', finished_job, id) == 1
      return is_known and NOT_INFLIGHT or NOT_FOUND
    end
    if job.token ~= token then return MISMATCH end
    if job.expires_at <= now then return TOO_LATE end
    if progress ~= '' then
      job.rest = content(job) .. string.sub(progress, 2)
      set_more(job, PROGRESS, true)
    end
    if until_then > job.expires_at then
      job.expires_at = until_then
      call('ZADD', active, 'XX', until_then, id .. behind_id(job.worker))
    end
    call('HSET', active_job, id, packed(job))
    return {job.expires_at, more(job, CANCEL_REQUESTED) and 1 or 0}
  end)
end)

-- End expired leases.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 limit, 4 id for the failure queue
-- result  {length of the outbox, number of ended leases}
define('reclaim', {'allow-oom'}, function(keys, args)
  -- A repeated call may end other leases than its first try, so their dead jobs need other ids in the failure queue.
  failure_id = args[4] .. (is_again and '-again' or '')
  local ended = sweep(tonumber(args[3]))
  close_up()
  return {call('LLEN', outbox), ended}
end)
