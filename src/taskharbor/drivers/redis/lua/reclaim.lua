-- needs: draining, ending
-- End leases that are over.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 limit, 4 id for the failure queue
-- result  {how many wait in the outbox, how many leases were ended}
failure_id = ARGV[4]
local ended = sweep(tonumber(ARGV[3]))
close_up()
return {call('LLEN', outbox), ended}
