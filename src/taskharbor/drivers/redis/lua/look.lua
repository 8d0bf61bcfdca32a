-- What one who is about to wait has to know of a queue.
-- reads only
-- KEYS  1 waiting, 2 active, 3 meta
-- ARGV  1 since: instants up to this one are known to the caller (microseconds)
-- Result: {moves, first instant after `since` at which a job or the end of a lease comes due, or -1}
local first = -1
for place = 1, 2 do
  local found = redis.call('ZRANGEBYSCORE', KEYS[place], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  local instant = tonumber(found[2])
  if instant and (first < 0 or instant < first) then
    first = instant
  end
end
return {tonumber(redis.call('HGET', KEYS[3], 'moves') or 0), first}
