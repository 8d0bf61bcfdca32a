-- needs: log, dying
-- What a script that ended leases writes down last.

-- Read when the first lease ends.
local latest_end = nil

-- The latest end of a lease: no later lease may begin before it, whatever its caller's clock says.
local function note_end(over_at)
  if latest_end == nil then latest_end = tonumber(call('HGET', meta, 'latest_end') or 0) end
  if over_at > latest_end then latest_end = over_at end
end

-- At the end of every script that may have ended leases. The number of moves where there was one.
local function close_up()
  close_log()
  if latest_end then call('HSET', meta, 'latest_end', latest_end) end
  return wake()
end
