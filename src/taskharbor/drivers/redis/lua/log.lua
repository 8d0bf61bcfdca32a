-- needs: records
-- The attempt log. A row's number is its place in the stream, and each row names the one before it of the same job.
--
--   front   when it ended, outcome, what the job became, length of its id, length of the error
--   id
--   error   {type, message}, packed; empty where there is none
--   job     the stored job up to its head, without the token, as it was before it changed; then a grain
local ROW = '>I8I1I1I2I4'
local OUTCOME_DONE, RETRIED, OUTCOME_DEAD, EXPIRED, RELEASED, OUTCOME_CANCELLED, MERGED, REQUEUED = 0, 1, 2, 3, 4, 5, 6, 7

-- Begun with the first row of a script.
local next_row = nil
local last_row = nil
local highest_end = nil
-- The front of the last row, and of what: those of a batch are mostly the same.
local row_front, front_of, front_size = nil, nil, nil

-- Append a row and say its number. Front, with the lease, and head are the stored job's as it was.
local function write_row(id, front, head, outcome, state, ended_at, error)
  if next_row == nil then
    next_row = counting_from(next_stamp('row'))
    highest_end = tonumber(call('HGET', meta, 'highest_end') or 0)
  end
  local number, text = next_row()
  last_row = text
  if error ~= '' or front_of ~= ended_at or outcome ~= OUTCOME_DONE or front_size ~= #id then
    row_front = struct.pack(ROW, ended_at, outcome, state, #id, #error)
    front_of = error == '' and outcome == OUTCOME_DONE and ended_at or nil
    front_size = #id
  end
  call('XADD', attempts, text, 'r', row_front .. id .. error .. front .. head .. string.char(number % 256))
  if ended_at < highest_end then
    call('ZADD', late, ended_at, text)
  else
    highest_end = ended_at
  end
  return number
end

-- The number of the job's row before this one, 0 where this is its first.
local function row_before(row)
  local _, _, _, id_size, error_size, at = struct.unpack(ROW, row)
  local _, _, _, _, _, before = struct.unpack(FRONT, row, at + id_size + error_size)
  return before
end

local function append_row(job, outcome, state, ended_at, error_type, error_message)
  local error = error_type and cmsgpack.pack({error_type, error_message}) or ''
  -- Nobody asks the log for these, and a last error may be long.
  local head = job.head
  local kept = head[MORE]
  head[MORE] = false
  local front, packed_head = packed_parts(job)
  head[MORE] = kept
  job.last_row = write_row(job.id, front, packed_head, outcome, state, ended_at, error)
end

local function close_log()
  if last_row then call('HSET', meta, 'row', last_row, 'highest_end', highest_end) end
end
