-- The attempt log; see layout.lua. Rows are numbered in the order in which they are written. Each row names the previous row of
-- its job.

-- The most rows of an entry. A search for one row reads its whole entry, and readers get whole entries. A row that ended before a
-- row in front of it has its own entry, because retention removes it from the middle.
local MOST_ROWS = 100

-- The number of the next row, after a script has written its first.
local next_row = nil
local highest_end = nil
-- The parts of the open entry, and the values that its rows have in common.
local parts, rows_in_entry, most_in_entry, first_row = nil, 0, 0, nil
local of_lease, of_outcome, of_state, of_end, of_error = nil, nil, nil, nil, nil
-- The front of the last row, and its values. The rows of a batch mostly have the same.
local row_front, front_before, front_fence, front_head, front_id = nil, nil, nil, nil, nil

local function close_entry()
  local number = string.format('%.0f', next_row - 1)
  parts[1] = struct.pack(ENTRY, of_end, of_outcome, of_state, rows_in_entry, #of_error, #of_lease)
  call('XADD', attempts, number, 'r', table.concat(parts))
  if of_end < highest_end then call('ZADD', late, of_end, number .. '-0') end
  highest_end = math.max(highest_end, of_end)
end

local function open_entry(lease, outcome, state, ended_at, error)
  if next_row == nil then
    next_row = stamp_after(call('HGET', meta, 'row'))
    highest_end = tonumber(call('HGET', meta, 'highest_end') or 0)
  else
    close_entry()
  end
  parts, rows_in_entry, first_row = {'', error, lease}, 0, next_row
  most_in_entry = ended_at < highest_end and 1 or MOST_ROWS
  of_lease, of_outcome, of_state, of_end, of_error = lease, outcome, state, ended_at, error
end

-- Add a row, and return the number of the first row in its entry. `fence`, `before` and `head` are those of the stored job before
-- the change.
local function write_row(id, fence, before, head, lease, outcome, state, ended_at, error)
  if
    of_lease ~= lease or of_end ~= ended_at or of_outcome ~= outcome or of_state ~= state or of_error ~= error
    or rows_in_entry == most_in_entry
  then
    open_entry(lease, outcome, state, ended_at, error)
  end
  if front_before ~= before or front_fence ~= fence or front_head ~= #head or front_id ~= #id then
    front_before, front_fence, front_head, front_id = before, fence, #head, #id
    row_front = struct.pack(ROW, #id, #head, fence, before)
  end
  local n = 3 * rows_in_entry + 3
  parts[n + 1], parts[n + 2], parts[n + 3] = row_front, id, head
  rows_in_entry = rows_in_entry + 1
  next_row = next_row + 1
  return first_row
end

-- `failure`: {type, message, detail}, or nil.
local function append_row(job, outcome, state, ended_at, failure)
  local error = failure and cmsgpack.pack({failure.type, failure.message}) or ''
  -- The log does not need MORE, and a last error may be long.
  local head = job.head
  local kept = head[MORE]
  head[MORE] = false
  local packed_head = cmsgpack.pack(head)
  head[MORE] = kept
  job.last_row = write_row(
    job.id, job.fence, job.last_row, packed_head, packed_lease(job), outcome, state, ended_at, error
  )
end

local function close_log()
  if not next_row then return end
  close_entry()
  call('HSET', meta, 'row', string.format('%.0f', next_row - 1), 'highest_end', highest_end)
end

-- Entries of the log, for readers.

local function number_in(place)
  return tonumber(string.match(place, '^%d+'))
end

-- Rows up to this number are gone, even if their entry is still there.
local function gone_up_to()
  return tonumber(call('HGET', meta, 'gone') or 0)
end

local function rows_in(value)
  local _, _, _, count = struct.unpack(ENTRY, value)
  return count
end

-- Return true if the job's last row says that it was requeued at `now`.
local function is_requeued_now(job)
  local found = job.last_row > 0 and call('XRANGE', attempts, job.last_row, '+', 'COUNT', 1)[1]
  if not found then return false end
  local ended_at, outcome = struct.unpack(ENTRY, found[2][2])
  return ended_at == now and outcome == REQUEUED
end

-- Return the number to which the row of this job points: the first row in an entry, or 0. nil if the job has no row in this
-- entry.
local function row_before(value, id)
  local _, _, _, count, error_size, lease_size, at = struct.unpack(ENTRY, value)
  at = at + error_size + lease_size
  for _ = 1, count do
    local id_size, head_size, _, before, id_at = struct.unpack(ROW, value, at)
    if id_size == #id and string.sub(value, id_at, id_at + id_size - 1) == id then return before end
    at = id_at + id_size + head_size
  end
  return nil
end
