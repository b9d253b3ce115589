-- Let each of the leases KEYS that has its value ARGV[2…] last for ARGV[1] milliseconds; return 1 for each such lease,
-- else 0.
local renewed = {}
for place, key in ipairs(KEYS) do
  renewed[place] = redis.call('get', key) == ARGV[place + 1] and redis.call('pexpire', key, ARGV[1]) or 0
end
return renewed
