-- Registers the functions. `export` is in export_function.lua or export_eval.lua; the way in which the server runs this text
-- decides.

-- A library stays loaded, so the variables of a call are set again when the next call begins. The last argument of every function
-- is 1 if an earlier try of the same call may have taken effect without an answer. It is taken off here.
local function begin(keys, args)
  waiting, active, waiting_job, active_job, finished_job, ready, types, scheduled, jobs, done, dead, cancelled, waiting_key,
    active_key, accepted, led_here, settings, meta, attempts, late, outbox, repeated, notify = unpack(keys)
  is_again = table.remove(args) == '1'
  call, channel, now, is_stirred = redis.call, args[1], tonumber(args[2]), false
  next_row, of_lease = nil, nil
  latest_end, failure_id, deaths, max_inflight, failure_queue = nil, '', 0, false, false
end

-- Flags: `no-writes` for functions that only read; `allow-oom` for functions that a server with full memory still runs, so that
-- its jobs can be finished. Such a server refuses all other functions before they begin.
local function define(name, flags, body)
  export(name, flags, function(keys, args)
    begin(keys, args)
    return body(keys, args)
  end)
end
