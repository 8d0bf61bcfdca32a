-- All of a write is published: say so, for those who try again.
--
-- KEYS    1 the last write of this series that was published or abandoned, as number:jobs, 2 hash of publications under way
-- ARGV    1 number of the write in its series, 2 the write, 3 how many became jobs, 4 seconds to remember it
-- result  {the mark: what was said by whoever came first, 1 where that is this call or its first try}
local mark = redis.call('GET', KEYS[1])
redis.call('HDEL', KEYS[2], ARGV[2])
local own = ARGV[1] .. ':' .. ARGV[3]
if mark and tonumber(string.match(mark, '^-?%d+')) >= tonumber(ARGV[1]) then return {mark, mark == own and 1 or 0} end
redis.call('SET', KEYS[1], own, 'EX', ARGV[4])
return {own, 1}
