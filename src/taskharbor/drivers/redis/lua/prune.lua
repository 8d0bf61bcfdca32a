-- needs: removing
-- Apply the queue's retention to ended jobs and to the attempt log.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 how many jobs at most, 4 how many rows at most,
--         5 to 7 how long done, dead jobs and rows are kept where nobody said otherwise
-- result  {how many jobs went, how many rows went}
local said = call('HMGET', settings, 'keep_done_us', 'keep_dead_us', 'keep_attempts_us')
local FOR_EVER = 'ever'

-- What ended at this instant or before is due; false where nothing ever is.
local function cutoff(n)
  local keep = said[n] or ARGV[4 + n]
  return keep ~= FOR_EVER and now - tonumber(keep)
end

local function prune_jobs(family, ended_by, limit)
  if not ended_by or limit <= 0 then return 0 end
  local ids = call('ZRANGEBYSCORE', family, '-inf', ended_by, 'LIMIT', 0, limit)
  forget(family, ids)
  return #ids
end

local function ended_at(row)
  return (struct.unpack('>I8', row[2][2]))
end

-- The highest number of a row that went: who reads on from a lower one has missed something.
local function note_trimmed(number)
  if tonumber(number) > tonumber(call('HGET', meta, 'trimmed') or 0) then call('HSET', meta, 'trimmed', number) end
end

-- Rows stand in the order they were written, which is that of their ends but for the few that `late` knows of.
local function prune_front(ended_by, limit)
  local gone = 0
  while gone < limit do
    local rows = call('XRANGE', attempts, '-', '+', 'COUNT', math.min(500, limit - gone))
    local due = {}
    for n = 1, #rows do
      if ended_at(rows[n]) > ended_by then break end
      due[n] = rows[n][1]
    end
    if #due > 0 then
      call('XDEL', attempts, unpack(due))
      note_trimmed(string.match(due[#due], '^%d+'))
      if call('EXISTS', late) == 1 then
        for n = 1, #due do due[n] = string.match(due[n], '^%d+') end
        call('ZREM', late, unpack(due))
      end
    end
    gone = gone + #due
    if #due < #rows or #rows == 0 then break end
  end
  return gone
end

local function prune_late(ended_by, limit)
  if limit <= 0 then return 0 end
  local rows = call('ZRANGEBYSCORE', late, '-inf', ended_by, 'LIMIT', 0, limit)
  call_with('XDEL', attempts, rows)
  call_with('ZREM', late, rows)
  for n = 1, #rows do note_trimmed(rows[n]) end
  return #rows
end

local most = tonumber(ARGV[3])
local gone = prune_jobs(done, cutoff(1), most)
gone = gone + prune_jobs(cancelled, cutoff(1), most - gone)
gone = gone + prune_jobs(dead, cutoff(2), most - gone)

local rows_gone, ended_by = 0, cutoff(3)
if ended_by then
  local most_rows = tonumber(ARGV[4])
  rows_gone = prune_front(ended_by, most_rows)
  rows_gone = rows_gone + prune_late(ended_by, most_rows - rows_gone)
  -- A stream stays when its last row goes.
  if rows_gone > 0 and call('XLEN', attempts) == 0 then call('DEL', attempts) end
end
call('ZREMRANGEBYSCORE', repeated, '-inf', now - 3600 * 1000000)
if call('EXISTS', repeated) == 0 then call('HDEL', meta, 'has_repeated') end
return {gone, rows_gone}
