-- Requeue all messages that a worker has in hand and has not started on.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- KEYS[4]  <namespace>:<queue>                       list of ids, what workers fetch from
--
-- Returns how many went back to the head of the queue.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('hlen', KEYS[3])
redis.call('llen', KEYS[4])

local count = 0
for _, id in ipairs(redis.call('sdiff', KEYS[1], KEYS[2])) do
  redis.call('srem', KEYS[1], id)
  if redis.call('hexists', KEYS[3], id) == 1 then
    redis.call('lpush', KEYS[4], id)
    count = count + 1
  end
end
if count > 0 then
  redis.pcall('publish', KEYS[4], '')
end
return count
