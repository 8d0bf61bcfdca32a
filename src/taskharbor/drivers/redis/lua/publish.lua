-- needs: accepting
-- Store a portion of a bulk write, unless it was stored before, and note that it is.
--
-- KEYS    the queue's, 23 the note of the write's series: number, portion and jobs added so far, with colons between
-- ARGV    1 channel, 2 now, 3 number of the write in its series, 4 portion, 5 seconds to keep the note, then five values per job,
--         no id twice: its id, its idempotency key or nothing, its ready member up to run_at (nothing where it has a key and goes
--         by the rules), its score in `waiting`, the stored job behind its number
-- result  how many jobs the write has added to this queue so far
local number, portion = tonumber(ARGV[3]), tonumber(ARGV[4])
local added = 0
local note = call('GET', KEYS[23])
if note then
  local noted, last, so_far = string.match(note, '^(-?%d+):(%d+):(%d+)$')
  if tonumber(noted) > number then return 0 end
  if tonumber(noted) == number then
    added = tonumber(so_far)
    if tonumber(last) >= portion then return added end
  end
end

local next_number = counting_from(next_stamp('seq'))
local waits, stored, in_line, numbers, later, leads = {}, {}, {}, {}, {}, {}
local last = nil

local function put(pairs, first, second)
  local n = #pairs
  pairs[n + 1], pairs[n + 2] = first, second
end

local function flush()
  if #waits == 0 then return end
  call_with('HSET', waiting_job, stored)
  call_with('ZADD', waiting, waits)
  call_with('ZADD', jobs, numbers)
  call_with('ZADD', ready, in_line)
  call_with('ZADD', scheduled, later)
  call_with('HSET', accepted, leads)
  waits, stored, in_line, numbers, later, leads = {}, {}, {}, {}, {}, {}
  is_stirred = true
end

local ids, keys = {}, {}
for at = 6, #ARGV, 5 do
  ids[#ids + 1] = ARGV[at]
  keys[#keys + 1] = ARGV[at + 1]
end
local known = ask_with('ZMSCORE', jobs, ids)
local led = table.concat(keys) ~= '' and ask_with('HMGET', accepted, keys) or {}
local taken = {}
for n = 1, #ids do
  local id, key, at = ids[n], keys[n], 5 * n + 3
  if not known[n] and not led[n] and not taken[key] then
    local seq, digits = next_number()
    local packed = struct.pack('>I8', seq)
    local place, score, value = ARGV[at], ARGV[at + 1], NEW_FRONT .. packed .. ARGV[at + 2]
    local is_new = true
    if key ~= '' then taken[key] = true end
    if place == '' then
      flush()
      local job = unpacked(id, value)
      is_new = accept(seq, id, job.head, job.rest) == 0
    else
      put(waits, score, id)
      put(stored, id, value)
      put(numbers, digits, id)
      if key ~= '' then put(leads, key, id) end
      if tonumber(score) <= now then
        put(in_line, '0', place .. packed .. id)
      else
        put(later, score, id)
      end
    end
    if is_new then
      last = digits
      added = added + 1
    end
  end
end
flush()
if last then call('HSET', meta, 'seq', last) end
call('SET', KEYS[23], number .. ':' .. portion .. ':' .. added, 'EX', ARGV[5])
wake()
return added
