-- reads only
-- needs: records
-- Jobs by their ids.
--
-- KEYS    the queue's
-- ARGV    1, 2 unused, then ids
-- result  per id the stored job, or nothing
local answers = {}
for n = 3, #ARGV do
  local id = ARGV[n]
  answers[n - 2] = call('HGET', waiting_job, id) or call('HGET', active_job, id) or call('HGET', finished_job, id)
end
return answers
