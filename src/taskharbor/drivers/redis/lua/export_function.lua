-- For FUNCTION LOAD. LIBRARY is the library's name: a server runs libraries of several releases side by side, and the names of
-- functions are shared by all.
local function export(name, flags, callback)
  redis.register_function({function_name = LIBRARY .. '_' .. name, callback = callback, flags = flags})
end
