-- Store bytes where the key holds others that are expected.
--
-- KEYS    1 the key
-- ARGV    1 the bytes, 2 the bytes that are expected; where they are left out, there must be no key
-- result  1, or 0 where something else was found
if redis.call('GET', KEYS[1]) ~= (ARGV[2] or false) then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
return 1
