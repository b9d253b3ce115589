-- Free a lease, whoever has it.
--
-- KEYS[1]  forgekeeper:{leases}:until   sorted set, name by the second it expires
-- KEYS[2]  forgekeeper:{leases}:since   sorted set, name by the second it was taken
-- KEYS[3]  forgekeeper:{leases}:owners  hash, name -> token, a space, and the holder for people to read
-- ARGV[1]  name
--
-- Returns 1 when somebody had it, 0 when it was free or has expired.

local time = redis.call('time')
local now = time[1] + time[2] / 1e6

local expires = tonumber(redis.call('zscore', KEYS[1], ARGV[1]))
redis.call('zrem', KEYS[1], ARGV[1])
redis.call('zrem', KEYS[2], ARGV[1])
redis.call('hdel', KEYS[3], ARGV[1])
return expires and expires > now and 1 or 0
