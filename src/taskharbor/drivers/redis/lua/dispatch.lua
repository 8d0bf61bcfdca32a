-- Ends the text for EVAL: the last argument names the function.
local name = table.remove(ARGV)
return functions[name](KEYS, ARGV)
