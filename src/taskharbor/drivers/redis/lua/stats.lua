-- needs: claiming, lines
-- The queue at a glance; costs the same for ten jobs and for ten million.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now
-- result  {1 where anybody ever used or configured it, its settings, jobs per state, done, dead and cancelled so far, run_at
--         of the job that is claimed next or nothing}
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
  call('ZCOUNT', waiting, '(' .. ARGV[2], '+inf'),
  call('ZCOUNT', waiting, '(0', ARGV[2]),
  call('ZCOUNT', waiting, '-inf', '(0'),
  call('ZCARD', active),
  call('ZCARD', done),
  call('ZCARD', dead),
  call('ZCARD', cancelled),
}
local totals = call('HMGET', meta, 'done_total', 'dead_total', 'cancelled_total')
return {is_known and 1 or 0, call('HGETALL', settings), counts, totals, head_run_at() or false}
