-- Requeue messages, to the head of their queue, in their order.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- KEYS[4]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- KEYS[5]  <namespace>:<queue>                       list of ids, what workers fetch from
-- ARGV     ids
--
-- Returns how many went back; those that are no longer in this worker's hands are not.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[2])
redis.call('hlen', KEYS[3])
redis.call('hlen', KEYS[4])
redis.call('llen', KEYS[5])

local count = 0
for i = #ARGV, 1, -1 do
  local id = ARGV[i]
  if redis.call('srem', KEYS[1], id) == 1 then
    if redis.call('srem', KEYS[2], id) == 1 then
      redis.call('hdel', KEYS[3], id)
    end
    if redis.call('hexists', KEYS[4], id) == 1 then
      redis.call('lpush', KEYS[5], id)
      count = count + 1
    end
  end
end
if count > 0 then
  redis.pcall('publish', KEYS[5], '')
end
return count
