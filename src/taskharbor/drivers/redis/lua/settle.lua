-- End leases, each by its own settlement, in order.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 id for the failure queue, 4 number of settlements, then their leases in runs of the same token:
--         token, number, ids; then for each settlement that is no plain ack: its place, the packed settlement (empty for an ack
--         with a result), the result of an ack
-- result  {length of the outbox, one number per settlement: 0 or an error}; no numbers if all are 0
define('settle', {'allow-oom'}, function(keys, args)
  failure_id = args[3]
  local count = tonumber(args[4])
  read_settings()

  local sub, pack_bytes, unpack_bytes = string.sub, struct.pack, struct.unpack

  -- Most settlements are plain acks. Their changes are made together.
  local acked, members, stored, ends = {}, {}, {}, {}

  local function flush()
    if #acked == 0 then return end
    call_with('ZREM', active, members)
    call_with('HDEL', active_job, acked)
    call_with('HSET', finished_job, stored)
    call_with('ZADD', done, ends)
    call('HINCRBY', meta, 'done_total', #acked)
    acked, members, stored, ends = {}, {}, {}, {}
  end

  -- The last stored lease and the last front. Those of a batch are mostly the same.
  local lease, lease_size, expires_at, reserved_at, logged_lease, lease_token, member_end = nil, 0, nil, nil, nil, nil, nil
  local ended_at, digits = nil, nil
  local front, front_fence, front_row, front_head = nil, nil, nil, nil

  local function look_at_lease(value)
    local _, worker_size, at
    _, expires_at, reserved_at, worker_size, at = unpack_bytes(LEASE, value)
    local token_at = at + worker_size
    lease_size = token_at + TOKEN_SIZE - 1
    lease = sub(value, 1, lease_size)
    logged_lease = sub(value, 1, token_at - 1)
    lease_token = sub(value, token_at, lease_size)
    member_end = behind_id(sub(value, at, token_at - 1))
    ended_at = math.max(now, reserved_at)
    digits = string.format('%.0f', ended_at)
    front = nil
  end

  -- A plain ack of a plain job under a valid lease changes only the front of the job. Returns false in any other case.
  local function is_acked_plainly(id, token, value)
    if sub(value, 1, lease_size) ~= lease then look_at_lease(value) end
    if expires_at <= now or lease_token ~= token then return false end
    local _, fence, before, _, head_size, is_plain, head_at = unpack_bytes(FRONT, value, lease_size + 1)
    if is_plain == 0 then return false end
    if not front then note_end(math.min(ended_at, expires_at)) end
    local head = sub(value, head_at, head_at + head_size - 1)
    local row = write_row(id, fence + 1, before, head, logged_lease, OUTCOME_DONE, DONE, ended_at, '')
    if not front or fence ~= front_fence or row ~= front_row or head_size ~= front_head then
      front_fence, front_row, front_head = fence, row, head_size
      front = pack_bytes(FRONT, DONE, fence + 1, row, ended_at, head_size, 1)
    end
    local n = #acked + 1
    acked[n] = id
    members[n] = id .. member_end
    stored[2 * n - 1], stored[2 * n] = id, front .. sub(value, head_at)
    ends[2 * n - 1], ends[2 * n] = digits, id
    if max_inflight then is_stirred = true end
    return true
  end

  local function record_failure(job, settlement)
    job.head[ATTEMPTS] = settlement.attempts
    set_last_error(job, settlement.error)
    set_more(job, FAILED_AT, now)
  end

  -- Back to waiting, unless a cancel was requested.
  local function send_back(job, outcome, run_at, settlement)
    local token, is_cancelled = job.token, more(job, CANCEL_REQUESTED)
    local state = is_cancelled and CANCELLED or waiting_state(run_at)
    local ended_at = end_lease(job, is_cancelled and OUTCOME_CANCELLED or outcome, state, settlement.error)
    if settlement.error then record_failure(job, settlement) end
    set_more(job, SETTLED, token)
    if is_cancelled then return finish(job, CANCELLED, ended_at) end
    job.head[RUN_AT] = run_at
    go_back(job)
  end

  local ENDS = {ack = {OUTCOME_DONE, DONE}, fail = {OUTCOME_DEAD, DEAD}, discard = {OUTCOME_CANCELLED, CANCELLED}}

  local function apply(job, settlement)
    local kind = settlement.type
    if kind == 'retry' then return send_back(job, RETRIED, settlement.run_at_us, settlement) end
    if kind == 'release' then return send_back(job, RELEASED, settlement.run_at_us or job.head[RUN_AT], settlement) end
    local outcome, state = unpack(ENDS[kind])
    local ended_at = end_lease(job, outcome, state, settlement.error or settlement.reason)
    if settlement.error then record_failure(job, settlement) end
    if settlement.reason then set_last_error(job, settlement.reason) end
    if settlement.result then
      job.rest = job.rest .. settlement.result
      set_more(job, RESULT, true)
    end
    finish(job, state, ended_at)
  end

  -- The job already has the state that the settlement would give it. That is a success, whatever the token.
  local function is_repeated(kind, state)
    return (kind == 'ack' and state == DONE)
      or (kind == 'fail' and (state == DONE or state == DEAD))
      or (kind == 'discard' and state == CANCELLED)
  end

  -- The answer for a job that is not inflight.
  local function answer_about(kind, id, token)
    local job = load(finished_job, id)
    if job and is_repeated(kind, job.state) then return OK end
    job = job or load(waiting_job, id)
    if not job then return NOT_FOUND end
    if is_again and more(job, SETTLED) == token then return OK end
    return NOT_INFLIGHT
  end

  local PLAIN_ACK = {type = 'ack'}

  -- `other`: the settlement, if it is not a plain ack.
  local function settle(id, token, other, value)
    if value and not other and is_acked_plainly(id, token, value) then return OK end
    local settlement = other or PLAIN_ACK
    if not value then return answer_about(settlement.type, id, token) end
    local job = unpacked(id, value)
    if job.token ~= token then
      return is_again and more(job, SETTLED) == token and OK or MISMATCH
    end
    if job.expires_at <= now then return TOO_LATE end
    apply(job, settlement)
    return OK
  end

  local ids, tokens, others = {}, {}, {}
  local at = 5
  while #ids < count do
    local token, several = args[at], tonumber(args[at + 1])
    for n = at + 2, at + 1 + several do
      ids[#ids + 1] = args[n]
      tokens[#tokens + 1] = token
    end
    at = at + 2 + several
  end
  for n = at, #args, 3 do
    others[tonumber(args[n])] = args[n + 1] == '' and {type = 'ack', result = args[n + 2]} or cmsgpack.unpack(args[n + 1])
  end
  local values = call_with('HMGET', active_job, ids)
  local codes, seen, is_all_ok = {}, {}, true
  for n = 1, count do
    local id, value = ids[n], values[n]
    if seen[id] then
      -- The value that was read in advance may be out of date.
      flush()
      value = call('HGET', active_job, id)
    end
    seen[id] = true
    local code = settle(id, tokens[n], others[n], value)
    codes[n] = code
    if code ~= OK then is_all_ok = false end
  end
  flush()
  close_up()
  if is_all_ok then codes = {} end
  table.insert(codes, 1, call('LLEN', outbox))
  return codes
end)
