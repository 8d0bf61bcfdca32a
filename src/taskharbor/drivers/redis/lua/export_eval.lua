-- For EVAL, on servers that refuse FUNCTION. All functions are defined with every call; dispatch.lua runs one.
local functions = {}

local function export(name, _, callback)
  functions[name] = callback
end
