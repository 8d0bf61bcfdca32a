-- reads only
-- Some members of a sorted set in their order. To write out the score of each would cost more than all the rest.
--
-- KEYS    1 the set
-- ARGV    1 from which score, 2 up to which, 3 how many
-- result  {score of the last, the members}; nothing where there are none
local members = redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[2], 'LIMIT', 0, ARGV[3])
if #members == 0 then return false end
return {redis.call('ZSCORE', KEYS[1], members[#members]), members}
