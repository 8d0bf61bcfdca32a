-- A write will not be published, unless that was decided before.
--
-- KEYS    1 the last write of this series that was published or abandoned, as number:jobs, 2 hash of publications under way
-- ARGV    1 number of the write in its series, 2 the write, 3 whether it takes nothing more from now on (1), 4 seconds to
--         remember that
-- result  the plan, where it was decided before; else nothing
local plan = redis.call('HGET', KEYS[2], ARGV[2])
if plan then return plan end
if ARGV[3] == '1' then redis.call('SET', KEYS[1], ARGV[1] .. ':0', 'EX', ARGV[4], 'NX') end
return false
