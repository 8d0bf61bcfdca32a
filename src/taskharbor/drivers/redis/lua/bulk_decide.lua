-- From here on a write will be published, by whoever gets to it.
--
-- KEYS    1 the last write of this series that was published or abandoned, as number:jobs, 2 hash of publications under way
-- ARGV    1 number of the write in its series, 2 the write, 3 the plan, packed
-- result  {the mark, where the write is over, else nothing; the plan that holds}
local mark = redis.call('GET', KEYS[1])
if mark and tonumber(string.match(mark, '^-?%d+')) >= tonumber(ARGV[1]) then return {mark, false} end
-- Whoever came first has said which tasks count.
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
return {false, redis.call('HGET', KEYS[2], ARGV[2])}
