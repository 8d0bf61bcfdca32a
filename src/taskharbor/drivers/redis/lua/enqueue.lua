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

-- Store jobs by the contract's rules, one after the other.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, 4 whether it is sent again (1), 5 the number to begin
--         with (empty for the next one; given where several queues get their jobs in one go), 6 the records, packed: {id,
--         place in the caller's batch, head}, then body and payload of each
-- result  {1 where these are the queue's first jobs ever, else 0; per record 0 where it was stored, else the id of the job
--         that was there}
define('enqueue', {}, function(keys, args)
  local name = args[3]
  if args[4] == '1' then
    note_repeated(name)
  elseif is_overtaken(name) then
    return {0}
  end

  local is_first = call('HEXISTS', meta, 'seq') == 0
  local base = next_stamp('seq')
  if args[5] ~= '' then base = math.max(tonumber(args[5]), tonumber(call('HGET', meta, 'seq') or 0) + 1) end
  local last = nil

  local answers = {is_first and 1 or 0}
  for n, record in ipairs(cmsgpack.unpack(args[6])) do
    local seq = base + record[2]
    answers[n + 1] = accept(seq, record[1], record[3], args[6 + n])
    if answers[n + 1] == 0 then last = seq end
  end
  if last then call('HSET', meta, 'seq', last) end
  wake()
  return answers
end)

-- Store jobs that nobody knows yet and that have no key of any kind: the same as enqueue.lua, with one command per structure.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, then the jobs in runs of the same type, priority and run_at: how many, their
--         score in `waiting`, their ready member up to run_at (empty where they come due later), then per job: id, and the
--         stored job behind its number
-- result  1 where these are the queue's first jobs ever, else 0; -1 where an id is known after all, and nothing was stored
define('enqueue_new', {}, function(keys, args)
  local known = call('HMGET', meta, 'seq', 'moves', 'has_repeated')
  if known[3] and is_overtaken(args[3]) then return 0 end

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

  local front, next_number = new_front(), counting_from(stamp_after(known[1]))
  local ids, stored, in_line, numbers, later = {}, {}, {}, {}, {}
  local n, last = 0, nil
  local at = 4
  while at < #args do
    local count, score, place = tonumber(args[at]), args[at + 1], args[at + 2]
    at = at + 3
    for _ = 1, count do
      local id = args[at]
      local seq, digits = next_number()
      local number = struct.pack('>I8', seq)
      n = n + 2
      ids[n - 1], ids[n] = score, id
      stored[n - 1], stored[n] = id, front .. number .. args[at + 1]
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
end)

-- Store a portion of a bulk write, unless it was stored before, and note that it is.
--
-- KEYS    the queue's, 23 the note of the write's series: number, portion and jobs added so far, with colons between
-- ARGV    1 channel, 2 now, 3 number of the write in its series, 4 portion, 5 seconds to keep the note, then five values per job,
--         no id twice: its id, its idempotency key or nothing, its ready member up to run_at (nothing where it has a key and goes
--         by the rules), its score in `waiting`, the stored job behind its number
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

  local front, next_number = new_front(), counting_from(next_stamp('seq'))
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

  local ids, idempotency_keys = {}, {}
  for at = 6, #args, 5 do
    ids[#ids + 1] = args[at]
    idempotency_keys[#idempotency_keys + 1] = args[at + 1]
  end
  local known = ask_with('ZMSCORE', jobs, ids)
  local led = table.concat(idempotency_keys) ~= '' and ask_with('HMGET', accepted, idempotency_keys) or {}
  local taken = {}
  for n = 1, #ids do
    local id, key, at = ids[n], idempotency_keys[n], 5 * n + 3
    if not known[n] and not led[n] and not taken[key] then
      local seq, digits = next_number()
      local packed = struct.pack('>I8', seq)
      local place, score, value = args[at], args[at + 1], front .. packed .. args[at + 2]
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
  call('SET', keys[23], number .. ':' .. portion .. ':' .. added, 'EX', args[5])
  wake()
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
