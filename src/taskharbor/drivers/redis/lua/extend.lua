-- needs: draining, records
-- Heartbeats: every valid lease holds until now + lease_for, or longer where it already did.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 lease_for, 4 the heartbeats, packed: {id, token, place of its progress in ARGV or false}, then
--         progress
-- result  per heartbeat: when the lease expires, or minus that where a cancel was requested; or as text: 1 not found, 2 not
--         inflight, 3 not the token, 4 expired
local until_then = now + tonumber(ARGV[3])
local beats = cmsgpack.unpack(ARGV[4])

local function extend(id, token, progress)
  local job = load(active_job, id)
  if not job then
    return (call('HEXISTS', waiting_job, id) == 1 or call('HEXISTS', finished_job, id) == 1) and '2' or '1'
  end
  local head = job.head
  if job.token ~= token then return '3' end
  if job.expires_at <= now then return '4' end
  if progress then
    job.rest = content(job) .. progress
    set_more(job, HAS_PROGRESS, true)
  end
  if until_then > job.expires_at then
    job.expires_at = until_then
    call('ZADD', active, 'XX', until_then, active_member(id, job.worker))
  end
  call('HSET', active_job, id, packed(job))
  return more(job, IS_CANCEL_WANTED) and -job.expires_at or job.expires_at
end

local answers = {}
for n, beat in ipairs(beats) do
  answers[n] = extend(beat[1], beat[2], beat[3] and ARGV[beat[3]])
end
return answers
