-- Requeue what a worker has lost: in its hands by Redis's account and not by its own.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- KEYS[4]  <namespace>:<queue>                       list of ids, what workers fetch from
-- ARGV     ids that the worker knows of
--
-- Returns how many went back to the head of the queue.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[2])
redis.call('hlen', KEYS[3])
redis.call('llen', KEYS[4])

local held = {}
for _, id in ipairs(ARGV) do
  held[id] = true
end
local count = 0
for _, id in ipairs(redis.call('smembers', KEYS[1])) do
  if not held[id] then
    redis.call('srem', KEYS[1], id)
    redis.call('srem', KEYS[2], id)
    if redis.call('hexists', KEYS[3], id) == 1 then
      redis.call('lpush', KEYS[4], id)
      count = count + 1
    end
  end
end
if count > 0 then
  redis.pcall('publish', KEYS[4], '')
end
return count
