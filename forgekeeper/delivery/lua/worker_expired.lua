-- Note a worker's heartbeat, and list the expired workers.
--
-- KEYS[1]  <namespace>:__heartbeats__  sorted set, worker by the millisecond of its last heartbeat
-- ARGV[1]  worker
-- ARGV[2]  how long is too long, in milliseconds
--
-- Returns their names.
--
-- The heartbeat is noted as by worker_heartbeat.lua, and first, as there.

local time = redis.call('time')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('zrem', KEYS[1], ARGV[1])
redis.call('zadd', KEYS[1], now, ARGV[1])
for _, worker in ipairs(redis.call('zrangebyscore', KEYS[1], '(' .. now, '+inf')) do
  -- The clock was set back.  Who lives gives another heartbeat; a dead one would be waited for until it has caught up.
  redis.call('zrem', KEYS[1], worker)
  redis.call('zadd', KEYS[1], now, worker)
end
return redis.call('zrangebyscore', KEYS[1], '-inf', '(' .. now - ARGV[2])
