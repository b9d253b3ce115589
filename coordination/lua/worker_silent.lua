-- List the workers that have been silent for too long.
--
-- KEYS[1]  <namespace>:__heartbeats__  sorted set, worker by the millisecond of its last sign of life
-- ARGV[1]  how long is too long, in milliseconds
--
-- Returns their names.

local now = redis.call('time')
local horizon = now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[1]
return redis.call('zrangebyscore', KEYS[1], '-inf', '(' .. horizon)
