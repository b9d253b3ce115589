-- Forget dead letters that died before a horizon, a bounded number of them.
--
-- KEYS[1]  <namespace>:<queue>.XQ       sorted set, id by the millisecond of its death
-- KEYS[2]  <namespace>:<queue>.XQ.msgs  hash, id -> body
-- ARGV[1]  time to live, in milliseconds
-- ARGV[2]  how many to forget at most
--
-- Returns how many were forgotten.

local now = redis.call('time')
local horizon = now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[1]
local ids = redis.call('zrangebyscore', KEYS[1], '-inf', '(' .. horizon, 'limit', 0, ARGV[2])
for _, id in ipairs(ids) do
  redis.call('zrem', KEYS[1], id)
  redis.call('hdel', KEYS[2], id)
end
return #ids
