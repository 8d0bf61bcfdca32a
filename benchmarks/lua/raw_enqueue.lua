-- Store one job: its record, and its place in the order.
-- KEYS: 1 hash of records, 2 sorted set of ids.
-- ARGV: 1 id, 2 record, 3 score.
-- Result: 1.
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
