-- The attempt log; see layout.lua. Rows are numbered in the order they are written, and each names the previous row of its job.

-- Who wants one row has to look through its entry, and readers get whole ones. Rows that ended before one in front of them
-- have an entry each: retention takes them out of the middle.
local MOST_ROWS = 100

-- The number of the next row, once a script has written its first.
local next_row = nil
local highest_end = nil
-- The entry that rows are added to, as its parts, and what its rows have in common.
local parts, rows_in_entry, most_in_entry, first_row = nil, 0, 0, nil
local of_lease, of_outcome, of_state, of_end, of_error = nil, nil, nil, nil, nil
-- The front of the last row, and of what: those of a batch are mostly the same.
local row_front, front_before, front_fence, front_head, front_id = nil, nil, nil, nil, nil

local function close_entry()
  local number = string.format('%.0f', next_row - 1)
  parts[1] = struct.pack(ENTRY, of_end, of_outcome, of_state, rows_in_entry, #of_error, #of_lease)
  call('XADD', attempts, number, 'r', table.concat(parts))
  if of_end < highest_end then
    call('ZADD', late, of_end, number)
  else
    highest_end = of_end
  end
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

-- Add a row, and say the number of the first in its entry. Fence, head and what comes before are the stored job's as it was.
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

-- `failure`, where there is one: {type, message, detail}.
local function append_row(job, outcome, state, ended_at, failure)
  local error = failure and cmsgpack.pack({failure.type, failure.message}) or ''
  -- Nobody asks the log for these, and a last error may be long.
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

-- Entries of the log as a reader finds them.

local function number_in(place)
  return tonumber(string.match(place, '^%d+'))
end

-- Rows up to this number are gone, whether their entry still lies there or not.
local function gone_up_to()
  return tonumber(call('HGET', meta, 'gone') or 0)
end

local function rows_in(value)
  local _, _, _, count = struct.unpack(ENTRY, value)
  return count
end

-- Where the row of this job leads to: the number of the first row in an entry, or 0. Nothing where it has none here.
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
