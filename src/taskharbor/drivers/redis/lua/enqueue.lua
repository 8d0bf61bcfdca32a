-- needs: repeating, accepting
-- Store jobs by the contract's rules, one after the other.
--
-- KEYS    the queue's
-- ARGV    1 channel, 2 now, 3 name of the call, 4 whether it is sent again (1), 5 the number to begin
--         with (empty for the next one; given where several queues get their jobs in one go), 6 the records, packed: {id,
--         place in the caller's batch, head}, then body and payload of each
-- result  {1 where these are the queue's first jobs ever, else 0; per record 0 where it was stored, else the id of the job
--         that was there}
local name = ARGV[3]
if ARGV[4] == '1' then
  note_repeated(name)
elseif is_overtaken(name) then
  return {0}
end

local is_first = call('HEXISTS', meta, 'seq') == 0
local base = next_stamp('seq')
if ARGV[5] ~= '' then base = math.max(tonumber(ARGV[5]), tonumber(call('HGET', meta, 'seq') or 0) + 1) end
local last = nil

local answers = {is_first and 1 or 0}
for n, record in ipairs(cmsgpack.unpack(ARGV[6])) do
  local seq = base + record[2]
  answers[n + 1] = accept(seq, record[1], record[3], ARGV[6 + n])
  if answers[n + 1] == 0 then last = seq end
end
if last then call('HSET', meta, 'seq', last) end
wake()
return answers
