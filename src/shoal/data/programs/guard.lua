-- Loaded before a program: the functions that tests compare with stay as they are.
local os_table, unit = os, nil
local ok, library = pcall(require, "luaunit")
if ok then unit = library end

local function functions(of)
  local copies = {}
  for name, value in pairs(of) do
    if type(value) == "function" then copies[name] = value end
  end
  return copies
end

local copies = unit and { [unit] = functions(unit), [unit.LuaUnit] = functions(unit.LuaUnit) } or {}
local own_os = setmetatable({}, { __index = functions(os_table), __newindex = function() end, __metatable = false })
local held = { assert = assert, error = error, require = require, os = own_os }
local next_of, loaded, set = next, package.loaded, rawset

function held.held_for_tests()
  for owner, each in next_of, copies do
    for name, value in next_of, each do set(owner, name, value) end
  end
  loaded.luaunit = unit
  return held.assert, held.error, held.require, own_os
end

for name in pairs(held) do _G[name] = nil end
setmetatable(_G, {
  __index = held,
  __newindex = function(globals, name, value)
    if held[name] == nil then set(globals, name, value) end
  end,
  __metatable = false,
})
