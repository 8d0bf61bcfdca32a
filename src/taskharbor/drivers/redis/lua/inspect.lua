-- Return the stored jobs of these ids, false for an id that is not there.
local function stored_jobs(ids)
  local values = call_with('HMGET', finished_job, ids)
  for _, family in ipairs({waiting_job, active_job}) do
    local others = call_with('HMGET', family, ids)
    for n = 1, #ids do values[n] = values[n] or others[n] end
  end
  return values
end

-- Jobs by their ids.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, then ids
-- result  per id the stored job, or nothing
define('find', {'no-writes'}, function(_, args)
  local ids = {}
  for n = 3, #args do ids[n - 2] = args[n] end
  return stored_jobs(ids)
end)

-- Jobs in descending order of their numbers, newest first.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the number below which to begin, 4 the most jobs, 5 the requested states, a digit each; empty for all
-- result  {the number below which to go on, or 0 if nothing follows; id, stored job, id, stored job, ...}
define('page', {'no-writes'}, function(_, args)
  local below, most, wanted = tonumber(args[3]), tonumber(args[4]), args[5]
  local FEW = 10000
  local LOOK_AT = 5000

  local function is_wanted(state)
    return wanted == '' or string.find(wanted, state, 1, true) ~= nil
  end

  local function number_of(id)
    return tonumber(call('ZSCORE', jobs, id))
  end

  -- Few jobs are in the requested states: read all of them, in order.
  local function from_their_sets()
    local count, ids, found = 0, {}, {}
    for _, set in ipairs({
      {READY, waiting, '(0', '+inf'}, {BLOCKED, waiting, '-inf', '(0'}, {INFLIGHT, active, '-inf', '+inf'},
      {DONE, done, '-inf', '+inf'}, {DEAD, dead, '-inf', '+inf'}, {CANCELLED, cancelled, '-inf', '+inf'},
    }) do
      local state, key, low, high = unpack(set)
      if is_wanted(state) then
        count = count + call('ZCOUNT', key, low, high)
        if count > FEW then return nil end
        for _, member in ipairs(call('ZRANGEBYSCORE', key, low, high)) do
          ids[#ids + 1] = key == active and id_in(member) or member
        end
      end
    end
    for n, seq in ipairs(call_with('ZMSCORE', jobs, ids)) do
      if tonumber(seq) < below then found[#found + 1] = {tonumber(seq), ids[n]} end
    end
    table.sort(found, function(one, other) return one[1] > other[1] end)
    local page = {}
    for n = 1, math.min(most, #found) do page[n] = found[n][2] end
    return page, #found > most
  end

  local ids, has_more = nil, nil
  if wanted ~= '' then ids, has_more = from_their_sets() end
  if not ids then
    -- Else read through all jobs, a portion at a time.
    local count = wanted == '' and most or LOOK_AT
    ids = call('ZREVRANGEBYSCORE', jobs, '(' .. args[3], '-inf', 'LIMIT', 0, count)
    has_more = #ids == count
  end
  local values = stored_jobs(ids)
  local answer = {has_more and number_of(ids[#ids]) or 0}
  local found = 0
  for n = 1, #ids do
    if values[n] and is_wanted(string.byte(values[n])) then
      found = found + 1
      answer[2 * found], answer[2 * found + 1] = ids[n], values[n]
      if found == most and n < #ids then
        answer[1] = number_of(ids[n])
        break
      end
    end
  end
  return answer
end)

-- Figures of the queue. They cost the same for ten jobs and for ten million.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now
-- result  {1 if anybody ever used or configured it, its settings, jobs per state, done, dead and cancelled so far, run_at
--         of the job that is claimed next or nothing}
define('stats', {'allow-oom'}, function(keys, args)
  local is_known = call('EXISTS', meta, settings) > 0
  if promote(10000) then is_stirred = true end
  wake()

  local _, next_ids = first_in_line(lines_of(nil, 1), 1)
  local head_run_at = next_ids[1] and load(waiting_job, next_ids[1]).head[RUN_AT]

  local counts = {
    call('ZCOUNT', waiting, '(' .. args[2], '+inf'),
    call('ZCOUNT', waiting, '(0', args[2]),
    call('ZCOUNT', waiting, '-inf', '(0'),
    call('ZCARD', active), call('ZCARD', done), call('ZCARD', dead), call('ZCARD', cancelled),
  }
  local totals = call('HMGET', meta, 'done_total', 'dead_total', 'cancelled_total')
  return {is_known and 1 or 0, call('HGETALL', settings), counts, totals, head_run_at or false}
end)

-- Read the attempt log.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the number of the row before the first, 4 the number of the last row, 5 the number of rows
-- result  {the number up to which rows are gone, place, entry, place, entry, ...}: entries with rows in between, up to the entry
--         that completes this number of rows; the first and the last entry may have other rows as well
define('log_page', {'no-writes'}, function(keys, args)
  local gone = gone_up_to()
  local after, last, most = math.max(gone, tonumber(args[3])), tonumber(args[4]), tonumber(args[5])
  -- The rows of an entry have numbers without a gap, so an entry this far behind has no row in the range.
  local to = string.format('%.0f', last + MOST_ROWS - 1)
  local from = string.format('(%.0f', after)
  local answer, rows, count = {gone}, 0, 10
  while rows < most do
    local found = call('XRANGE', attempts, from, to, 'COUNT', count)
    for n = 1, #found do
      local place, value = found[n][1], found[n][2][2]
      local in_it = rows_in(value)
      local number = number_in(place)
      if rows >= most or number - in_it >= last then return answer end
      answer[#answer + 1] = place
      answer[#answer + 1] = value
      rows = rows + in_it - math.max(0, after - number + in_it)
    end
    if #found < count then break end
    from = '(' .. answer[#answer - 1]
    count = math.min(2 * count, 1000)
  end
  return answer
end)

-- Find the entries of rows in the attempt log.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, then numbers of rows
-- result  per number the first number of the entry that holds the next row behind it; 0 if there is none
define('log_probe', {'no-writes'}, function(keys, args)
  local answer = {}
  for n = 3, #args do
    local found = call('XRANGE', attempts, '(' .. args[n], '+', 'COUNT', 1)[1]
    answer[#answer + 1] = found and number_in(found[1]) - rows_in(found[2][2]) + 1 or 0
  end
  return answer
end)

-- One job's rows of the attempt log. Each row points to the row before it, and the job points to its last row.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the job's id
-- result  nothing if the job is not known; else the entries of the log that have its rows, newest first, as log_page
--         answers
define('job_rows', {'no-writes'}, function(keys, args)
  local id = args[3]
  local value = stored_jobs({id})[1]
  if not value then return false end
  local answer = {gone_up_to()}
  local number = unpacked(id, value).last_row
  while number > 0 do
    local found = call('XRANGE', attempts, number, '+', 'COUNT', 1)[1]
    -- Else retention has removed this row and all rows before it. The next entry may hold a later row of the same job.
    local is_it = found and number_in(found[1]) - rows_in(found[2][2]) < number
    local before = is_it and row_before(found[2][2], id)
    if not before then break end
    answer[#answer + 1] = found[1]
    answer[#answer + 1] = found[2][2]
    number = before
  end
  return answer
end)
