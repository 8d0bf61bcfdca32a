-- needs: accepting
-- Turn staged jobs into jobs, in the order they were written.
--
-- KEYS    the queue's, 23 hash of how far it came with the write, then the lists of the tasks
-- ARGV    1 channel, 2 now, 3 how many jobs at most, 4 seconds to keep the hash
-- result  {how many staged jobs the queue has taken so far, how many of them became jobs, how many are still staged}
--
-- A staged job is four values: its id, its ready member up to run_at, its score in `waiting`, the stored job behind its number.
-- For those with keys, which go by the rules: its id, nothing, its head, its body and payload.
local FIRST_LIST = 24
local left = tonumber(ARGV[3])

-- A server whose memory is full refuses this, and nothing has changed yet.
call('HINCRBY', meta, 'moves', 0)

local next_number = nil
local waits, stored, in_line, numbers, later = {}, {}, {}, {}, {}
local last, added = nil, 0

local function flush()
  if #waits == 0 then return end
  call_with('HSET', waiting_job, stored)
  call_with('ZADD', waiting, waits)
  call_with('ZADD', jobs, numbers)
  call_with('ZADD', ready, in_line)
  call_with('ZADD', scheduled, later)
  waits, stored, in_line, numbers, later = {}, {}, {}, {}, {}
  is_stirred = true
end

local function put(id, place, score, tail)
  local seq, digits = next_number()
  local number = struct.pack('>I8', seq)
  local n = #waits
  waits[n + 1], waits[n + 2] = score, id
  stored[n + 1], stored[n + 2] = id, NEW_FRONT .. number .. tail
  numbers[n + 1], numbers[n + 2] = digits, id
  if tonumber(score) <= now then
    in_line[#in_line + 1] = '0'
    in_line[#in_line + 1] = place .. number .. id
  else
    later[#later + 1] = score
    later[#later + 1] = id
  end
  last = digits
  added = added + 1
end

local function take(values)
  local ids = {}
  for at = 1, #values, 4 do ids[#ids + 1] = values[at] end
  local known = ask_with('ZMSCORE', jobs, ids)
  local is_here = {}
  for n = 1, #ids do
    local id, at = ids[n], 4 * n - 3
    if values[at + 1] == '' then
      flush()
      local seq, digits = next_number()
      if accept(seq, id, cmsgpack.unpack(values[at + 2]), values[at + 3]) == 0 then
        last = digits
        added = added + 1
      end
      is_here[id] = true
    elseif not known[n] and not is_here[id] then
      is_here[id] = true
      put(id, values[at + 1], values[at + 2], values[at + 3])
    end
  end
  flush()
end

local still, taken = 0, 0
for n = FIRST_LIST, #KEYS do
  local list = KEYS[n]
  while left > 0 do
    local portion = math.min(left, 1000)
    local values = call('LPOP', list, 4 * portion)
    if not values or #values == 0 then break end
    next_number = next_number or counting_from(next_stamp('seq'))
    take(values)
    taken = taken + #values / 4
    left = left - #values / 4
    if #values < 4 * portion then break end
  end
  local length = call('LLEN', list)
  if length > 0 then
    -- Now that a part of the write can be seen, the rest must never go.
    call('PERSIST', list)
    still = still + length / 4
  end
end
if last then call('HSET', meta, 'seq', last) end
if taken > 0 then
  call('HINCRBY', KEYS[23], 'taken', taken)
  call('HINCRBY', KEYS[23], 'added', added)
  call('EXPIRE', KEYS[23], ARGV[4])
end
wake()
local so_far = call('HMGET', KEYS[23], 'taken', 'added')
return {tonumber(so_far[1] or 0), tonumber(so_far[2] or 0), still}
