-- needs: records
-- Forget jobs that have ended, and the idempotency keys that led to them.

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

-- `family` is the set of those that ended the same way.
local function forget(family, ids)
  if #ids == 0 then return end
  if call('EXISTS', accepted) == 1 then forget_keys(ids, ask_with('HMGET', finished_job, ids)) end
  call_with('HDEL', finished_job, ids)
  call_with('ZREM', jobs, ids)
  call_with('ZREM', family, ids)
end
