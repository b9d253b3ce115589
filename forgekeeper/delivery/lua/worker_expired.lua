-- List the expired workers.
--
-- KEYS[1]  <namespace>:__heartbeats__  sorted set, worker by the millisecond of its last heartbeat
-- ARGV[1]  how long is too long, in milliseconds
--
-- Returns their names.

local time = redis.call('time')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, worker in ipairs(redis.call('zrangebyscore', KEYS[1], '(' .. now, '+inf')) do
  -- The clock was set back.  Who lives gives another heartbeat; a dead one would be waited for until it has caught up.
  redis.call('zrem', KEYS[1], worker)
  redis.call('zadd', KEYS[1], now, worker)
end
return redis.call('zrangebyscore', KEYS[1], '-inf', '(' .. now - ARGV[1])
