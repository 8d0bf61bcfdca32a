-- needs: draining, ending, claiming, repeating
-- End what is over, line up what came due, then lease the next jobs.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 lease_for, 4 limit, 5 worker, 6 token, which is also the name of the call, 7 whether it is sent
--         again (1), 8 id for the failure queue, 9 types, packed; empty for all
-- result  {how many wait in the outbox; how often the queue has moved, and what comes due next (-1: nothing), where the claim
--         took all there was, else -1 and -1; id, stored job, id, stored job, ...}
local lease_for, limit, worker, token = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local is_again = ARGV[7] == '1'
failure_id = ARGV[8]
if is_again then
  note_repeated(token)
elseif is_overtaken(token) then
  return {0, -1, -1}
end

sweep(1000)
local was_promoted = promote(10000)
local answer = {0, -1, -1}
local FIRST = 3

-- What an earlier try of this call has leased: the caller gets it now, or it goes back unspent where it wants less.
local function found_again()
  local all = call('HGETALL', active_job)
  for n = 1, #all, 2 do
    local job = unpacked(all[n], all[n + 1])
    if job.token == token then
      if #answer < FIRST + 2 * limit then
        answer[#answer + 1] = all[n]
        answer[#answer + 1] = all[n + 1]
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
  -- A lease that is over frees its place, swept or not.
  return math.min(limit, tonumber(said[2]) - call('ZCOUNT', active, '(' .. ARGV[2], '+inf'))
end

local function next_due()
  local waits = call('ZRANGEBYSCORE', waiting, '(' .. ARGV[2], '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  local ends = call('ZRANGE', active, 0, 0, 'WITHSCORES')[2]
  if waits and ends then return math.min(tonumber(waits), tonumber(ends)) end
  return tonumber(waits or ends or -1)
end

-- A key is taken along by the one that runs; only those who are not plain can have one.
local function take_key(id, value)
  local key = unpacked(id, value).head[KEY]
  if key then
    call('HDEL', waiting_key, key)
    call('HSET', active_key, key, id)
  end
end

local function lease(ids)
  local sub, pack_bytes, unpack_bytes = string.sub, struct.pack, struct.unpack
  local values = ask_with('HMGET', waiting_job, ids)
  local reserved_at = math.max(now, tonumber(call('HGET', meta, 'latest_end') or 0))
  local expires_at = reserved_at + lease_for
  local granted = struct.pack(LEASE, expires_at, reserved_at, #worker) .. worker .. token
  local deadline = string.format('%.0f', expires_at)
  local stored, leases = {}, {}
  for n = 1, #ids do
    local id, value = ids[n], values[n]
    local seq, head_size, _, is_plain, fence, last_row = unpack_bytes(FRONT, value)
    if is_plain == 0 then take_key(id, value) end
    value = pack_bytes(FRONT, seq, head_size, INFLIGHT, is_plain, fence + 1, last_row, 0)
      .. granted
      .. sub(value, FRONT_SIZE + 1)
    stored[2 * n - 1], stored[2 * n] = id, value
    leases[2 * n - 1], leases[2 * n] = deadline, active_member(id, worker)
    answer[FIRST + 2 * n - 1], answer[FIRST + 2 * n] = id, value
  end
  call_with('ZREM', waiting, ids)
  call_with('HDEL', waiting_job, ids)
  call_with('HSET', active_job, stored)
  call_with('ZADD', active, leases)
end

if not (is_again and (found_again() or limit == 0)) then
  local count = room()
  if count > 0 then
    local ids = take(ARGV[9] == '' and all_prefixes() or prefixes_of(cmsgpack.unpack(ARGV[9])), count)
    if #ids > 0 then lease(ids) end
  end
end
-- Nobody who begins to wait now finds these among the scheduled.
if was_promoted and call('EXISTS', ready) == 1 then is_stirred = true end
close_up()
answer[1] = call('LLEN', outbox)
if #answer < FIRST + 2 * limit then
  -- Who gets less than it asked for will wait next; this saves it a look.
  answer[2] = tonumber(call('HGET', meta, 'moves') or 0)
  answer[3] = next_due()
end
return answer
