-- Delete each of the leases KEYS that has its value ARGV[1…]; return how many that were.
local released = 0
for place, key in ipairs(KEYS) do
  if redis.call('get', key) == ARGV[place] then
    released = released + redis.call('del', key)
  end
end
return released
