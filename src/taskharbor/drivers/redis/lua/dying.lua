-- needs: keys
-- What is to be known where leases end and jobs may die.

-- ARGV gives what the jobs of a failure queue are named by; the call's own name, so that nobody else has it.
local failure_id = ''
local deaths = 0
local w, failure_queue = false, false

local function know_settings()
  local said = call('HMGET', settings, 'max_inflight', 'failure_queue')
  w, failure_queue = said[1], said[2]
end
