-- needs: accepting
-- Store a portion of a bulk write, unless it was stored before, and note that it is.
--
-- KEYS    the queue's, 23 the note of the write's series: number, portion and jobs added so far, with colons between
-- ARGV    1 channel, 2 now, 3 number of the write in its series, 4 portion, 5 seconds to keep the note, then four values per job:
--         its id, its ready member up to run_at, its score in `waiting`, the stored job behind its number; of one with keys,
--         which goes by the rules: its id, nothing, its head, its body and payload
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
local waits, stored, in_line, numbers, later = {}, {}, {}, {}, {}
local last = nil

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
  local packed = struct.pack('>I8', seq)
  local n = #waits
  waits[n + 1], waits[n + 2] = score, id
  stored[n + 1], stored[n + 2] = id, NEW_FRONT .. packed .. tail
  numbers[n + 1], numbers[n + 2] = digits, id
  if tonumber(score) <= now then
    in_line[#in_line + 1] = '0'
    in_line[#in_line + 1] = place .. packed .. id
  else
    later[#later + 1] = score
    later[#later + 1] = id
  end
  last = digits
  added = added + 1
end

local ids = {}
for at = 6, #ARGV, 4 do ids[#ids + 1] = ARGV[at] end
local known = #ids > 0 and ask_with('ZMSCORE', jobs, ids) or {}
local is_here = {}
for n = 1, #ids do
  local id, at = ids[n], 4 * n + 2
  if ARGV[at + 1] == '' then
    flush()
    local seq, digits = next_number()
    if accept(seq, id, cmsgpack.unpack(ARGV[at + 2]), ARGV[at + 3]) == 0 then
      last = digits
      added = added + 1
    end
    is_here[id] = true
  elseif not known[n] and not is_here[id] then
    is_here[id] = true
    put(id, ARGV[at + 1], ARGV[at + 2], ARGV[at + 3])
  end
end
flush()
if last then call('HSET', meta, 'seq', last) end
call('SET', KEYS[23], number .. ':' .. portion .. ':' .. added, 'EX', ARGV[5])
wake()
return added
