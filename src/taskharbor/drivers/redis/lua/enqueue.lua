-- Queues get their numbers, once and for all. Those who have one keep it.
--
-- KEYS    1 the hash of all queues: name -> number
-- ARGV    names
-- result  {name, number, ...} of all queues there are
define('register', {}, function(keys, args)
  for n = 1, #args do
    redis.call('HSETNX', keys[1], args[n], redis.call('HLEN', keys[1]) + 1)
  end
  return redis.call('HGETALL', keys[1])
end)

-- Store jobs in this order. They stand in `args` from `at` on, three values each: id, place in line up to run_at, and the stored
-- job without its number, which is `base` and its offset, or its place among them. Plain jobs are most of what comes: they are
-- stored together. Returns per job 0 where it was stored, else the id of the job that was there; and how many were stored.
local function store(args, at, base, offsets)
  local ids = {}
  for n = at, #args, 3 do ids[#ids + 1] = args[n] end
  local known = call_with('ZMSCORE', jobs, ids)
  local numbers, stored, waits, in_line, later = {}, {}, {}, {}, {}
  local answers, seen, count, last = {}, {}, 0, nil
  local last_place, run_at = nil, nil
  for n, id in ipairs(ids) do
    local place, value = args[at + 3 * n - 2], args[at + 3 * n - 1]
    local seq = base + (offsets and offsets[n] or n - 1)
    local number = struct.pack(SEQ, seq)
    if known[n] or seen[id] then
      answers[n] = id
    elseif string.byte(value, PLAIN_AT) == 0 then
      answers[n] = accept(unpacked(id, value .. number))
    else
      answers[n] = 0
      if place ~= last_place then
        last_place, run_at = place, math.max(struct.unpack('>I8', place, #place - 7), 1)
      end
      local line = run_at > now and later or in_line
      line[#line + 1] = run_at > now and run_at or 0
      line[#line + 1] = run_at > now and id or place .. number .. id
      local m = #stored
      numbers[m + 1], numbers[m + 2] = seq, id
      stored[m + 1], stored[m + 2] = id, value .. number
      waits[m + 1], waits[m + 2] = run_at, id
    end
    if answers[n] == 0 then
      count, last, seen[id] = count + 1, seq, true
    end
  end
  call_with('ZADD', jobs, numbers)
  call_with('HSET', waiting_job, stored)
  call_with('ZADD', waiting, waits)
  call_with('ZADD', ready, in_line)
  call_with('ZADD', scheduled, later)
  if last then call('HSET', meta, 'seq', last) end
  if #stored > 0 then is_stirred = true end
  wake()
  return answers, count
end

-- Store jobs by the contract's rules, one after the other.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, 4 whether it is sent again (1), 5 the number to begin with and 6 the offsets of
--         the jobs from it, packed (both empty for the next numbers; given where several queues get their jobs in one go), then
--         the jobs as `store` takes them
-- result  {1 where these are the queue's first jobs ever, else 0; unless all were stored, per job 0 where it was stored, else
--         the id of the job that was there}
define('enqueue', {}, function(keys, args)
  local known = call('HMGET', meta, 'seq', 'has_repeated')
  if args[4] == '1' then
    note_repeated(args[3])
  elseif known[2] and is_overtaken(args[3]) then
    return {0}
  end
  local base = args[5] == '' and stamp_after(known[1]) or math.max(tonumber(args[5]), tonumber(known[1] or 0) + 1)
  local answers, count = store(args, 7, base, args[6] ~= '' and cmsgpack.unpack(args[6]))
  if count == #answers then answers = {} end
  table.insert(answers, 1, known[1] and 0 or 1)
  return answers
end)

-- Store a portion of a bulk write, unless it was stored before, and note that it is.
--
-- KEYS    the queue's, 23 the note of the write's series: number, portion and jobs added so far, with colons between
-- ARGV    1 channel, 2 now, 3 number of the write in its series, 4 portion, 5 seconds to keep the note, then the jobs as `store`
--         takes them
-- result  how many jobs the write has added to this queue so far
define('publish', {}, function(keys, args)
  local number, portion = tonumber(args[3]), tonumber(args[4])
  local added = 0
  local note = call('GET', keys[23])
  if note then
    local noted, last, so_far = string.match(note, '^(-?%d+):(%d+):(%d+)$')
    if tonumber(noted) > number then return 0 end
    if tonumber(noted) == number then
      added = tonumber(so_far)
      if tonumber(last) >= portion then return added end
    end
  end
  local _, count = store(args, 6, stamp_after(call('HGET', meta, 'seq')))
  added = added + count
  call('SET', keys[23], number .. ':' .. portion .. ':' .. added, 'EX', args[5])
  return added
end)

-- Store bytes where the key holds others that are expected.
--
-- KEYS    1 the key
-- ARGV    1 the bytes, 2 the bytes that are expected; where they are left out, there must be no key
-- result  1, or 0 where something else was found
define('swap', {}, function(keys, args)
  if redis.call('GET', keys[1]) ~= (args[2] or false) then return 0 end
  redis.call('SET', keys[1], args[1])
  return 1
end)
