-- Forget an expired worker that has nothing in hand any more.
--
-- KEYS[1]    <namespace>:__heartbeats__               sorted set, worker by the millisecond of its last heartbeat
-- KEYS[2..]  <namespace>:__acks__.<worker>.<queue>    sets of ids that the worker has in hand
-- ARGV[1]    worker
-- ARGV[2]    how long is too long, in milliseconds
--
-- Returns 1 when it was forgotten, 0 when it still has messages or gives heartbeats again.

for i = 2, #KEYS do
  if redis.call('exists', KEYS[i]) == 1 then
    return 0
  end
end
local now = redis.call('time')
local last = redis.call('zscore', KEYS[1], ARGV[1])
if not last or tonumber(last) >= now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[2] then
  return 0
end
return redis.call('zrem', KEYS[1], ARGV[1])
