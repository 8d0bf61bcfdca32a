-- needs: repeating, records
-- Store jobs that nobody knows yet and that have no key of any kind: the same as enqueue.lua, with one command per structure.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, then the jobs in runs of the same type, priority and run_at: how many, their
--         score in `waiting`, their ready member up to run_at (empty where they come due later), then per job: id, and the
--         stored job behind its number
-- result  1 where these are the queue's first jobs ever, else 0; -1 where an id is known after all, and nothing was stored
local known = call('HMGET', meta, 'seq', 'moves', 'has_repeated')
if known[3] and is_overtaken(ARGV[3]) then return 0 end

-- Number the jobs; says whether one of them was there already, in which case all is as it was.
local function is_one_known(numbers)
  local added = 0
  for first = 1, #numbers, 4000 do
    added = added + call('ZADD', jobs, 'NX', unpack(numbers, first, math.min(first + 3999, #numbers)))
  end
  if added == #numbers / 2 then return false end
  for n = 1, #numbers, 2 do
    if call('ZSCORE', jobs, numbers[n + 1]) == numbers[n] then call('ZREM', jobs, numbers[n + 1]) end
  end
  return true
end

local next_number = counting_from(stamp_after(known[1]))
local ids, stored, in_line, numbers, later = {}, {}, {}, {}, {}
local n, last = 0, nil
local at = 4
while at < #ARGV do
  local count, score, place = tonumber(ARGV[at]), ARGV[at + 1], ARGV[at + 2]
  at = at + 3
  for _ = 1, count do
    local id = ARGV[at]
    local seq, digits = next_number()
    local number = struct.pack('>I8', seq)
    n = n + 2
    ids[n - 1], ids[n] = score, id
    stored[n - 1], stored[n] = id, NEW_FRONT .. number .. ARGV[at + 1]
    numbers[n - 1], numbers[n] = digits, id
    if place ~= '' then
      in_line[#in_line + 1] = '0'
      in_line[#in_line + 1] = place .. number .. id
    else
      later[#later + 1] = score
      later[#later + 1] = id
    end
    last = digits
    at = at + 2
  end
end
-- Who repeats a call after an unclear answer says again that its ids are new. The first set tells.
if is_one_known(numbers) then return -1 end
call_with('HSET', waiting_job, stored)
call_with('ZADD', waiting, ids)
call_with('ZADD', ready, in_line)
call_with('ZADD', scheduled, later)
local moves = tonumber(known[2] or 0) + 1
call('HSET', meta, 'seq', last, 'moves', moves)
announce(moves)
return known[1] and 0 or 1
