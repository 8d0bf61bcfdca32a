-- reads only
-- needs: entries
-- Where the rows of the attempt log are.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, then numbers of rows
-- result  per number the first and the last number of the entry that holds the next row behind it; 0, 0 where there is none
local answer = {}
for n = 3, #ARGV do
  local found = call('XRANGE', attempts, '(' .. ARGV[n], '+', 'COUNT', 1)[1]
  local last = found and number_in(found[1]) or 0
  answer[#answer + 1] = found and last - rows_in(found[2][2]) + 1 or 0
  answer[#answer + 1] = last
end
return answer
