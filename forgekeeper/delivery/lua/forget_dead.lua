-- Forget dead letters that died before a horizon, a bounded number of them.
--
-- KEYS[1]  <namespace>:<queue>.XQ          sorted set, id by the millisecond of its death
-- KEYS[2]  <namespace>:<queue>.XQ.msgs     hash, id -> body
-- KEYS[3]  <namespace>:<queue>.XQ.reasons  hash, id -> why it became a dead letter
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  how many to forget at most
--
-- Returns how many were forgotten.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('hlen', KEYS[2])
redis.call('hlen', KEYS[3])

local now = redis.call('time')
local horizon = now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[1]
local ids = redis.call('zrangebyscore', KEYS[1], '-inf', '(' .. horizon, 'limit', 0, ARGV[2])
for _, id in ipairs(ids) do
  redis.call('zrem', KEYS[1], id)
  redis.call('hdel', KEYS[2], id)
  redis.call('hdel', KEYS[3], id)
end
-- Dramatiq forgets old dead letters too, and knows nothing of their reasons.
if redis.call('hlen', KEYS[3]) > redis.call('zcard', KEYS[1]) then
  for _, id in ipairs(redis.call('hkeys', KEYS[3])) do
    if not redis.call('zscore', KEYS[1], id) then
      redis.call('hdel', KEYS[3], id)
    end
  end
end
return #ids
