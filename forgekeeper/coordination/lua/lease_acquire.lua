-- Take a lease, unless another has it; what has expired is nobody's, whatever its name.
--
-- KEYS[1]  forgekeeper:{leases}:until   sorted set, name by the second it expires
-- KEYS[2]  forgekeeper:{leases}:since   sorted set, name by the second it was taken
-- KEYS[3]  forgekeeper:{leases}:owners  hash, name -> token, a space, and the holder for people to read
-- ARGV[1]  name
-- ARGV[2]  owner, as in the hash
-- ARGV[3]  time to live, in seconds
-- ARGV[4]  the most that any lease may have left, in seconds
--
-- Returns 1 when the lease is the owner's, 0 when it is another's.  An owner that has it already, and
-- repeats itself after a lost reply, keeps it, renewed.

local time = redis.call('time')
local now = time[1] + time[2] / 1e6

for _, name in ipairs(redis.call('zrangebyscore', KEYS[1], '-inf', now)) do
  redis.call('zrem', KEYS[1], name)
  redis.call('zrem', KEYS[2], name)
  redis.call('hdel', KEYS[3], name)
end

if not redis.call('zscore', KEYS[1], ARGV[1]) then
  redis.call('zadd', KEYS[2], now, ARGV[1])
  redis.call('hset', KEYS[3], ARGV[1], ARGV[2])
elseif redis.call('hget', KEYS[3], ARGV[1]) ~= ARGV[2] then
  if tonumber(redis.call('zscore', KEYS[1], ARGV[1])) > now + ARGV[4] then
    -- The clock was set back.  A holder that lives renews it; a dead one's would last until the clock has caught up.
    redis.call('zadd', KEYS[1], now + ARGV[4], ARGV[1])
  end
  return 0
end
redis.call('zadd', KEYS[1], now + ARGV[3], ARGV[1])
return 1
