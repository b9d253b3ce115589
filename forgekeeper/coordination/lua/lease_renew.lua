-- Let a lease live on, but only while it is still its owner's.
--
-- KEYS[1]  forgekeeper:{leases}:until   sorted set, name by the second it expires
-- KEYS[2]  forgekeeper:{leases}:owners  hash, name -> token, a space, and the holder for people to read
-- ARGV[1]  name
-- ARGV[2]  owner, as in the hash
-- ARGV[3]  time to live, in seconds
--
-- Returns 1 when it was renewed, 0 when it has expired or is another's, and then nothing was changed.

local time = redis.call('time')
local now = time[1] + time[2] / 1e6

local expires = tonumber(redis.call('zscore', KEYS[1], ARGV[1]))
if not expires or expires <= now or redis.call('hget', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('zadd', KEYS[1], now + ARGV[3], ARGV[1])
return 1
