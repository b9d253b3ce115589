-- Take the leases KEYS that are free, each with its value ARGV[2…], for ARGV[1] milliseconds; return 1 for each that is
-- ours, else 0.  A repeated call finds the leases that a call without a reply has taken.
local taken = {}
for place, key in ipairs(KEYS) do
  local value = ARGV[place + 1]
  local is_ours = redis.call('set', key, value, 'nx', 'px', ARGV[1]) or redis.call('get', key) == value
  taken[place] = is_ours and 1 or 0
end
return taken
