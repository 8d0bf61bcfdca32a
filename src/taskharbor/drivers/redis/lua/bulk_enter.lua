-- A task of a write says what it is about to stage, or that all of it is there.
--
-- KEYS    1 the last write of this series that was published or abandoned, as number:jobs, 2 hash of what was
--         staged for the write
-- ARGV    1 number of the write in its series, 2 seconds to keep it, then names and values for the hash
-- result  1, or 0 where the write is over and takes nothing more
local mark = redis.call('GET', KEYS[1])
if mark and tonumber(string.match(mark, '^-?%d+')) >= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[2], unpack(ARGV, 3))
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
