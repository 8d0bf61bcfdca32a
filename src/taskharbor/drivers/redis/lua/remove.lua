-- needs: removing
-- Remove jobs that have ended, by id.
--
-- KEYS    the queue's
-- ARGV    1 unused, 2 now, then the ids
-- result  per id the state it was in; 10 more where it has not ended and stays, -1 where it is not found
local families = {[DONE] = done, [DEAD] = dead, [CANCELLED] = cancelled}
local chosen = {[DONE] = {}, [DEAD] = {}, [CANCELLED] = {}}

local function look_at(id)
  local job = load(finished_job, id)
  if job then
    local ids = chosen[job.state]
    ids[#ids + 1] = id
    return job.state
  end
  job = load(waiting_job, id) or load(active_job, id)
  if not job then return -1 end
  return 10 + (job.state == WAITING and job.head[RUN_AT] > now and SCHEDULED or job.state)
end

local answers = {}
for n = 3, #ARGV do answers[n - 2] = look_at(ARGV[n]) end
for state, ids in pairs(chosen) do forget(families[state], ids) end
return answers
