-- Take a bucket back from its owner; return 1, or 0 when it was not its own any more.
--
-- KEYS     available, occupied, owners, state: `BucketSet.keys`
-- ARGV     number and token
--
-- A bucket that exists no longer is dropped instead of made available.

local available, occupied, owners, state = unpack(KEYS)
local number, token = unpack(ARGV)
if redis.call('hget', owners, number) ~= token then
  return 0
end
redis.call('hdel', owners, number)
redis.call('zrem', occupied, number)
local max = tonumber(redis.call('hget', state, 'max_buckets'))
if not max or tonumber(number) < max then
  redis.call('sadd', available, number)
end
return 1
