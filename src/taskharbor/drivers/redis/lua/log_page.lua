-- reads only
-- needs: entries
-- The attempt log from a row on.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the number of the row to begin behind, 4 the number of the last, 5 how many rows
-- result  {up to which number rows are gone, place, entry, place, entry, ...}: entries with rows in between, up to the one that
--         makes them so many; the first and the last may have others as well
local gone = gone_up_to()
local after, last, most = math.max(gone, tonumber(ARGV[3])), tonumber(ARGV[4]), tonumber(ARGV[5])
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
