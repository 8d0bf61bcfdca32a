-- Give numbers to queues. A queue that has one keeps it. A store with another layout is not changed.
--
-- KEYS    1 the hash of all queues: name -> number; no name -> version of the layout
-- ARGV    names
-- result  {name, number, ...} of all queues
define('register', {}, function(keys, args)
  if redis.call('EXISTS', keys[1]) == 0 then redis.call('HSET', keys[1], '', LAYOUT_VERSION) end
  local is_known = tonumber(redis.call('HGET', keys[1], '')) == LAYOUT_VERSION
  for n = 1, is_known and #args or 0 do
    redis.call('HSETNX', keys[1], args[n], redis.call('HLEN', keys[1]))
  end
  return redis.call('HGETALL', keys[1])
end)

-- Store jobs in this order. They are in `args` from `at` on, three values each: id, place in line up to run_at, and the stored
-- job without its number. The number is `base` plus the job's offset, or plus its place among them. Most jobs are plain, and
-- plain jobs are stored together. Returns per job 0 if it was stored, else the id of the job that was there; and the number of
-- stored jobs.
local function store(args, at, base, offsets)
  local ids, count = {}, (#args - at + 1) / 3
  for n = 1, count do ids[n] = args[at + 3 * n - 3] end
  local known = call_with('ZMSCORE', jobs, ids)
  local numbers, stored, waits, in_line, later = {}, {}, {}, {}, {}
  local answers, seen, added, last = {}, {}, 0, nil
  local pack, byte = struct.pack, string.byte
  -- Formatted once if many jobs have the same: Redis takes texts, and would format every number again.
  local last_place, score, is_due, names = nil, nil, nil, {}
  for n = 1, count do
    local id, place, value = ids[n], args[at + 3 * n - 2], args[at + 3 * n - 1]
    local seq = base + (offsets and offsets[n] or n - 1)
    local number = pack(SEQ, seq)
    local answer = 0
    if known[n] or seen[id] then
      answer = id
    elseif byte(value, PLAIN_AT) == 0 then
      answer = accept(unpacked(id, value .. number))
    else
      if place ~= last_place then
        local _, at = place_from(place .. number, #place - 9)
        local run_at = math.max(at, 1)
        last_place, score, is_due = place, string.format('%.0f', run_at), run_at <= now
        if is_due then names[#names + 1] = string.sub(place, 3, -11) end
      end
      if is_due then
        in_line[#in_line + 1] = '0'
        in_line[#in_line + 1] = place .. number .. id
      else
        later[#later + 1] = score
        later[#later + 1] = id
      end
      local m = #stored
      numbers[m + 1], numbers[m + 2] = seq, id
      stored[m + 1], stored[m + 2] = id, value .. number
      waits[m + 1], waits[m + 2] = score, id
    end
    if answer == 0 then added, last, seen[id] = added + 1, seq, true end
    answers[n] = answer
  end
  call_with('ZADD', jobs, numbers)
  call_with('HSET', waiting_job, stored)
  call_with('ZADD', waiting, waits)
  call_with('ZADD', ready, in_line)
  call_with('SADD', types, names)
  call_with('ZADD', scheduled, later)
  if last then call('HSET', meta, 'seq', last) end
  if #stored > 0 then is_stirred = true end
  wake()
  return answers, added
end

-- Store jobs by the contract's rules, one after the other.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, 4 the first number and 5 the packed offsets of the jobs from it (both empty: use
--         the next numbers; given if several queues get their jobs in one call), then the jobs as `store` takes them
-- result  {1 if these are the queue's first jobs ever, else 0; unless all were stored, per job 0 if it was stored, else
--         the id of the job that was there}
define('enqueue', {}, function(keys, args)
  local known = call('HMGET', meta, 'seq', 'has_repeated')
  if is_again then
    note_repeated(args[3])
  elseif known[2] and is_overtaken(args[3]) then
    return {0}
  end
  local base = args[4] == '' and stamp_after(known[1]) or math.max(tonumber(args[4]), tonumber(known[1] or 0) + 1)
  local answers, count = store(args, 6, base, args[5] ~= '' and cmsgpack.unpack(args[5]))
  if count == #answers then answers = {} end
  table.insert(answers, 1, known[1] and 0 or 1)
  return answers
end)

-- Store a portion of a bulk write, unless it was stored before, and note that it is stored.
--
-- KEYS    the queue's, 24 the note of the write's series: number, portion and jobs added so far, with colons between
-- ARGV    1 channel, 2 now, 3 number of the write in its series, 4 portion, 5 seconds to keep the note, then the jobs as `store`
--         takes them
-- result  the number of jobs that the write has added to this queue so far
define('publish', {}, function(keys, args)
  local number, portion = tonumber(args[3]), tonumber(args[4])
  local added = 0
  local note = call('GET', keys[24])
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
  call('SET', keys[24], number .. ':' .. portion .. ':' .. added, 'EX', args[5])
  return added
end)

-- Store bytes if the key holds the expected bytes.
--
-- KEYS    1 the key
-- ARGV    1 the bytes, 2 the expected bytes; without them, the key must not exist
-- result  1, or 0 if the key holds something else
define('swap', {}, function(keys, args)
  if redis.call('GET', keys[1]) ~= (args[2] or false) then return 0 end
  redis.call('SET', keys[1], args[1])
  return 1
end)
