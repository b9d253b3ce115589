-- Let no entry wait for a time that only a clock that was ahead can have meant.
--
-- KEYS[1]  {pending_direct_uploads}:pending   sorted set, entry by the second it was registered
-- KEYS[2]  {pending_direct_uploads}:deleting  sorted set, entry by the second it is due again
-- ARGV[1]  how far ahead of now an entry may lie by right, in seconds
--
-- Returns how many were mended, a thousand of each at most: they were registered, or are due, now.

local now = redis.call('time')[1]
local mended = 0
for _, key in ipairs(KEYS) do
  for _, member in ipairs(redis.call('zrangebyscore', key, '(' .. now + ARGV[1], '+inf', 'limit', 0, 1000)) do
    redis.call('zadd', key, now, member)
    mended = mended + 1
  end
end
return mended
