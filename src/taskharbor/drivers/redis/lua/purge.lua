-- needs: removing
-- Remove ended jobs that match. Looks at a bounded number of them; the caller goes on from there.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now (unused), 3 which: done, dead or cancelled, 4 limit, 5 how many to pass over, 6 ended before (or
--         +inf), 7 types, packed; empty for all, 8 1 where a key is asked for, 9 the key
-- result  {how many were removed, how many were looked at and kept, 1 where there may be more}
local LOOK_AT = 5000
local family = ({done = done, dead = dead, cancelled = cancelled})[ARGV[3]]
local limit, skip = tonumber(ARGV[4]), tonumber(ARGV[5])
local before = ARGV[6] == '+inf' and '+inf' or '(' .. ARGV[6]

local wanted = nil
if ARGV[7] ~= '' then
  wanted = {}
  for _, name in ipairs(cmsgpack.unpack(ARGV[7])) do wanted[name] = true end
end
local key = ARGV[8] == '1' and ARGV[9] or nil

local function matches(value)
  local _, head = cmsgpack.unpack_one(value, HEAD_AT - 1)
  return (not wanted or wanted[head[TYPE]]) and (not key or head[KEY] == key)
end

local most = (wanted or key) and LOOK_AT or math.min(LOOK_AT, limit)
local ids = call('ZRANGEBYSCORE', family, '-inf', before, 'LIMIT', skip, most)
local looked_at = #ids
local chosen = {}
if wanted or key then
  local values = looked_at > 0 and ask_with('HMGET', finished_job, ids) or {}
  for n = 1, #ids do
    if #chosen == limit then
      looked_at = n - 1
      break
    end
    if matches(values[n]) then chosen[#chosen + 1] = ids[n] end
  end
else
  chosen = ids
end
local removed = #chosen
forget(family, chosen)
return {removed, looked_at - removed, looked_at > 0 and 1 or 0}
