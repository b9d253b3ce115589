-- Record a heartbeat of a bucket's owner, and return why it has to end.
--
-- KEYS     available, occupied, owners, state: `BucketSet.keys`
-- ARGV     number and token
--
-- Returns nil, 'scale_down' (still its own, but it exists no longer: to be released soon), or
-- 'bucket_lost', and then nothing was changed.

local _, occupied, owners, state = unpack(KEYS)
local number, token = unpack(ARGV)
if redis.call('hget', owners, number) ~= token or not redis.call('zscore', occupied, number) then
  return 'bucket_lost'
end
redis.call('zadd', occupied, redis.call('time')[1], number)
local max = tonumber(redis.call('hget', state, 'max_buckets'))
if max and tonumber(number) >= max then
  return 'scale_down'
end
return nil
