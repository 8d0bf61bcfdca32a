-- Jobs by their ids.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, then ids
-- result  per id the stored job, or nothing
define('find', {'no-writes'}, function(keys, args)
  local answers = {}
  for n = 3, #args do
    local id = args[n]
    answers[n - 2] = call('HGET', waiting_job, id) or call('HGET', active_job, id) or call('HGET', finished_job, id)
  end
  return answers
end)

-- Jobs from a number down, newest first.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the highest number (as of a range: (5 is below 5), 4 how many jobs at most, 5 the states that are asked
--         for, a digit each; empty for all
-- result  {where to go on, as in 3, or empty where nothing follows; id, stored job, id, stored job, ...}
define('page', {'no-writes'}, function(keys, args)
  local bound, most, wanted = args[3], tonumber(args[4]), args[5]
  local FEW = 10000
  local LOOK_AT = 5000

  local function is_wanted(state)
    return wanted == '' or string.find(wanted, state, 1, true) ~= nil
  end

  -- The sets that hold jobs of the states asked for, and between which scores.
  local function homes()
    local found = {}
    if is_wanted(READY) then found[#found + 1] = {waiting, '(0', '+inf'} end
    if is_wanted(BLOCKED) then found[#found + 1] = {waiting, '-inf', '(0'} end
    if is_wanted(INFLIGHT) then found[#found + 1] = {active, '-inf', '+inf'} end
    if is_wanted(DONE) then found[#found + 1] = {done, '-inf', '+inf'} end
    if is_wanted(DEAD) then found[#found + 1] = {dead, '-inf', '+inf'} end
    if is_wanted(CANCELLED) then found[#found + 1] = {cancelled, '-inf', '+inf'} end
    return found
  end

  local function are_few(sets)
    local count = 0
    for _, set in ipairs(sets) do
      local key = set[1]
      count = count + call('ZCOUNT', key, set[2], set[3])
    end
    return count <= FEW
  end

  -- Where there are few, all of them are put in order.
  local function from_homes(sets)
    local ids = {}
    for _, set in ipairs(sets) do
      local key = set[1]
      for _, member in ipairs(call('ZRANGEBYSCORE', key, set[2], set[3])) do
        ids[#ids + 1] = key == active and id_in(member) or member
      end
    end
    if #ids == 0 then return {}, '' end
    local below = bound == '+inf' and math.huge or tonumber((string.gsub(bound, '^%(', '')))
    local is_open = string.sub(bound, 1, 1) == '('
    local seqs = ask_with('ZMSCORE', jobs, ids)
    local found = {}
    for n = 1, #ids do
      local seq = tonumber(seqs[n])
      if seq < below or (seq == below and not is_open) then found[#found + 1] = {seq, ids[n]} end
    end
    table.sort(found, function(one, other) return one[1] > other[1] end)
    local page = {}
    for n = 1, math.min(most, #found) do page[n] = found[n][2] end
    return page, #found > most and string.format('(%.0f', found[most][1]) or ''
  end

  -- Else one looks through all jobs, some at a time.
  local function from_all()
    local count = wanted == '' and most or LOOK_AT
    local ids = call('ZREVRANGEBYSCORE', jobs, bound, '-inf', 'LIMIT', 0, count)
    if #ids < count then return ids, '' end
    return ids, '(' .. call('ZSCORE', jobs, ids[count])
  end

  local sets = wanted ~= '' and homes() or {}
  local ids, following
  if wanted ~= '' and are_few(sets) then
    ids, following = from_homes(sets)
  else
    ids, following = from_all()
  end

  local answer = {following}
  if #ids == 0 then return answer end
  local families = {}
  if is_wanted(READY) or is_wanted(BLOCKED) then families[#families + 1] = waiting_job end
  if is_wanted(INFLIGHT) then families[#families + 1] = active_job end
  if is_wanted(DONE) or is_wanted(DEAD) or is_wanted(CANCELLED) then families[#families + 1] = finished_job end
  local values = {}
  for _, family in ipairs(families) do values[#values + 1] = ask_with('HMGET', family, ids) end
  local found = 0
  for n = 1, #ids do
    local value = false
    for m = 1, #values do value = value or values[m][n] end
    if value and (wanted == '' or is_wanted(string.byte(value))) then
      found = found + 1
      answer[2 * found], answer[2 * found + 1] = ids[n], value
      if found == most and n < #ids then
        answer[1] = '(' .. call('ZSCORE', jobs, ids[n])
        break
      end
    end
  end
  return answer
end)

-- The queue at a glance; costs the same for ten jobs and for ten million.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now
-- result  {1 where anybody ever used or configured it, its settings, jobs per state, done, dead and cancelled so far, run_at
--         of the job that is claimed next or nothing}
define('stats', {'allow-oom'}, function(keys, args)
  local is_known = call('EXISTS', meta, settings) > 0
  if promote(10000) then is_stirred = true end
  wake()

  local function head_run_at()
    local lines = opened_lines(all_prefixes(), 1)
    local best = lines[1]
    for n = 2, #lines do
      if comes_before(lines[n], best) then best = lines[n] end
    end
    -- The line's own figure cannot tell what was before 1970.
    return best and load(waiting_job, string.sub(best.member, best.skip + 18)).head[RUN_AT]
  end

  local counts = {
    call('ZCOUNT', waiting, '(' .. args[2], '+inf'),
    call('ZCOUNT', waiting, '(0', args[2]),
    call('ZCOUNT', waiting, '-inf', '(0'),
    call('ZCARD', active),
    call('ZCARD', done),
    call('ZCARD', dead),
    call('ZCARD', cancelled),
  }
  local totals = call('HMGET', meta, 'done_total', 'dead_total', 'cancelled_total')
  return {is_known and 1 or 0, call('HGETALL', settings), counts, totals, head_run_at() or false}
end)

-- The attempt log from a row on.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the number of the row to begin behind, 4 the number of the last, 5 how many rows
-- result  {up to which number rows are gone, place, entry, place, entry, ...}: entries with rows in between, up to the one that
--         makes them so many; the first and the last may have others as well
define('log_page', {'no-writes'}, function(keys, args)
  local gone = gone_up_to()
  local after, last, most = math.max(gone, tonumber(args[3])), tonumber(args[4]), tonumber(args[5])
  local FEW = 10
  -- An entry's rows have numbers without a gap, so none that lies behind this has one of those.
  local to = string.format('%.0f', last + MOST_ROWS - 1)
  local from = string.format('(%.0f', after)
  local answer, rows, count = {gone}, 0, FEW
  while rows < most do
    local found = call('XRANGE', attempts, from, to, 'COUNT', count)
    local of_these = 0
    for n = 1, #found do
      local place, value = found[n][1], found[n][2][2]
      local in_it = rows_in(value)
      local number = number_in(place)
      if number - in_it >= last then return answer end
      answer[#answer + 1] = place
      answer[#answer + 1] = value
      of_these = of_these + in_it - math.max(0, after - number + in_it)
      if rows + of_these >= most then return answer end
    end
    if #found < count then break end
    rows = rows + of_these
    from = '(' .. answer[#answer - 1]
    -- As many as it should take, by those seen so far.
    count = math.max(FEW, math.min(1000, math.ceil((most - rows) * (#answer - 1) / 2 / rows)))
  end
  return answer
end)

-- Where the rows of the attempt log are.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, then numbers of rows
-- result  per number the first and the last number of the entry that holds the next row behind it; 0, 0 where there is none
define('log_probe', {'no-writes'}, function(keys, args)
  local answer = {}
  for n = 3, #args do
    local found = call('XRANGE', attempts, '(' .. args[n], '+', 'COUNT', 1)[1]
    local last = found and number_in(found[1]) or 0
    answer[#answer + 1] = found and last - rows_in(found[2][2]) + 1 or 0
    answer[#answer + 1] = last
  end
  return answer
end)

-- One job's rows of the attempt log. Each leads to the one before it, and the job to the last of them.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the job's id
-- result  nothing where the job is not known; else the entries of the log that have its rows, newest first, as log_page.lua
--         answers
define('job_rows', {'no-writes'}, function(keys, args)
  local id = args[3]
  local value = call('HGET', waiting_job, id) or call('HGET', active_job, id) or call('HGET', finished_job, id)
  if not value then return false end
  local answer = {gone_up_to()}
  local number = unpacked(id, value).last_row
  while number > 0 do
    local found = call('XRANGE', attempts, number, '+', 'COUNT', 1)[1]
    -- Else retention has taken it, and with it all before: what comes next may be a later row of the same job.
    local is_it = found and number_in(found[1]) - rows_in(found[2][2]) < number
    local before = is_it and row_before(found[2][2], id)
    if not before then break end
    answer[#answer + 1] = found[1]
    answer[#answer + 1] = found[2][2]
    number = before
  end
  return answer
end)
