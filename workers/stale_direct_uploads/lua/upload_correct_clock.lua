-- Make entries due that wait for a time which only a clock that was ahead can have meant.
--
-- KEYS[1]  {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[2]  {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- ARGV[1]  how far ahead of now an entry may lie, in seconds
--
-- Returns how many were corrected, a thousand of each set at most: they count as registered, or due again, now.

local now = redis.call('time')[1]
local corrected = 0
for _, key in ipairs(KEYS) do
  for _, member in ipairs(redis.call('zrangebyscore', key, '(' .. now + ARGV[1], '+inf', 'limit', 0, 1000)) do
    redis.call('zadd', key, now, member)
    corrected = corrected + 1
  end
end
return corrected
