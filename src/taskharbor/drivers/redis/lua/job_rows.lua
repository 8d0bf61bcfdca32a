-- reads only
-- needs: entries
-- One job's rows of the attempt log. Each leads to the one before it, and the job to the last of them.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the job's id
-- result  nothing where the job is not known; else the entries of the log that have its rows, newest first, as log_page.lua
--         answers
local id = ARGV[3]
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
