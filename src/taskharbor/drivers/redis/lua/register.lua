-- Queues get their numbers, once and for all. Those who have one keep it.
--
-- KEYS    1 the hash of all queues: name -> number
-- ARGV    names
-- result  {name, number, ...} of all queues there are
for n = 1, #ARGV do
  redis.call('HSETNX', KEYS[1], ARGV[n], redis.call('HLEN', KEYS[1]) + 1)
end
return redis.call('HGETALL', KEYS[1])
