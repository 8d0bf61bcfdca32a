-- needs: keys
-- Replace the queue's settings.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now (unused), then names and values
-- result  nothing
call('DEL', settings)
call('HSET', settings, unpack(ARGV, 3))
is_stirred = true
wake()
return false
