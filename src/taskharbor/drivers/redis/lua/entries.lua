-- needs: log
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
