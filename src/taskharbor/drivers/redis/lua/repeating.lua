-- needs: keys
-- Calls whose answer was lost are sent again, by the same name. Should the server read the first one only after that, it must
-- do nothing.

local KEEP_FOR = 3600 * 1000000

local function note_repeated(name)
  call('ZREMRANGEBYSCORE', repeated, '-inf', now - KEEP_FOR)
  call('ZADD', repeated, now, name)
  -- Who reads this field anyway need not ask for the set.
  call('HSET', meta, 'has_repeated', 1)
end

-- Whether this first try comes after its own repetition.
local function is_overtaken(name)
  return call('EXISTS', repeated) == 1 and call('ZSCORE', repeated, name) ~= false
end
