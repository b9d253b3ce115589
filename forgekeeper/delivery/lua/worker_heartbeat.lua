-- Note a worker's heartbeat, by Redis's clock.
--
-- KEYS[1]  <namespace>:__heartbeats__  sorted set, worker by the millisecond of its last heartbeat
-- ARGV[1]  worker
--
-- Returns 1.
--
-- It is removed and added: a full Redis lets a script go on whose first write needs no memory,
-- and without heartbeats every worker's messages would be taken from it.

local now = redis.call('time')
redis.call('zrem', KEYS[1], ARGV[1])
redis.call('zadd', KEYS[1], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
return 1
