-- Finish a batch.
-- KEYS: 1 sorted set of payloads under lease.
-- ARGV: the payloads.
-- Result: how many there were.
return redis.call('ZREM', KEYS[1], unpack(ARGV))
