-- reads only
-- needs: log
-- One job's rows of the attempt log. Each names the one before it, and the job the last of them.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, 3 the job's id
-- result  nothing where the job is not known; else {number, row, number, row, ...}, newest first
local id = ARGV[3]
local value = call('HGET', waiting_job, id) or call('HGET', active_job, id) or call('HGET', finished_job, id)
if not value then return false end
local answer = {}
local number = unpacked(id, value).last_row
while number > 0 do
  local row = call('XRANGE', attempts, number, number)[1]
  -- Retention has taken it, and with it all before.
  if not row then break end
  answer[#answer + 1] = row[1]
  answer[#answer + 1] = row[2][2]
  number = row_before(row[2][2])
end
return answer
