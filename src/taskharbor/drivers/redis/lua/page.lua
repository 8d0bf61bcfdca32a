-- reads only
-- needs: records
-- Jobs from a number down, newest first.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the highest number (as of a range: (5 is below 5), 4 how many jobs at most, 5 the states that are asked
--         for, a digit each; empty for all
-- result  {where to go on, as in 3, or empty where nothing follows; id, stored job, id, stored job, ...}
local bound, most, wanted = ARGV[3], tonumber(ARGV[4]), ARGV[5]
local FEW = 10000
local LOOK_AT = 5000

local function is_wanted(state)
  return wanted == '' or string.find(wanted, state, 1, true) ~= nil
end

-- The sets that hold jobs of the states asked for, and between which scores.
local function homes()
  local found = {}
  if is_wanted(WAITING) then found[#found + 1] = {waiting, '(0', '+inf'} end
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
if is_wanted(WAITING) or is_wanted(BLOCKED) then families[#families + 1] = waiting_job end
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
