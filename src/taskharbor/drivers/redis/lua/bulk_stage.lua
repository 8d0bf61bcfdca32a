-- Put down some of a task's jobs for one queue, where nobody sees them.
--
-- KEYS    1 list of what the task stages for the queue
-- ARGV    1 length of the list before, 2 seconds to keep it, then the values
-- result  1, or 0 where something that was staged before is gone
local at, count = tonumber(ARGV[1]), #ARGV - 2
local length = redis.call('LLEN', KEYS[1])
if length ~= at then
  -- An earlier try of this call may have put them there.
  return length == at + count and 1 or 0
end
for first = 3, #ARGV, 4000 do
  redis.call('RPUSH', KEYS[1], unpack(ARGV, first, math.min(first + 3999, #ARGV)))
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
