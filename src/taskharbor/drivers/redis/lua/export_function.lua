-- For FUNCTION LOAD. LIBRARY is the library's name. A server runs libraries of several releases side by side, and all libraries
-- share one set of function names.
local function export(name, flags, callback)
  redis.register_function({function_name = LIBRARY .. '_' .. name, callback = callback, flags = flags})
end
