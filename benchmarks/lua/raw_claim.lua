-- Lease a batch: the least that survives a worker's death.
-- KEYS: 1 list of payloads that wait, 2 sorted set of payloads under lease, scored by its end.
-- ARGV: 1 how many, 2 when the lease ends.
-- Result: the payloads.
local payloads = redis.call('LPOP', KEYS[1], ARGV[1])
if not payloads then
  return {}
end
local leases = {}
for i, payload in ipairs(payloads) do
  leases[2 * i - 1] = ARGV[2]
  leases[2 * i] = payload
end
redis.call('ZADD', KEYS[2], unpack(leases))
return payloads
