-- Put a delayed message whose time has come into its queue.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>.DQ  set of ids that the worker waits with
-- KEYS[2]  <namespace>:<queue>.DQ.msgs               hash, id -> body of messages that wait for their time
-- KEYS[3]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- KEYS[4]  <namespace>:<queue>                       list of ids, what workers fetch from
-- ARGV[1]  id
-- ARGV[2]  body that was fetched from the delayed queue
-- ARGV[3]  body for the queue
--
-- Returns 1 when the message was in this worker's hands, 0 when it was not; then nothing was
-- changed.  A message with its id that is in the queue already stays the only one.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('hlen', KEYS[3])
redis.call('llen', KEYS[4])

if redis.call('hget', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('srem', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('hdel', KEYS[2], ARGV[1])
if redis.call('hsetnx', KEYS[3], ARGV[1], ARGV[3]) == 1 then
  redis.call('rpush', KEYS[4], ARGV[1])
  redis.pcall('publish', KEYS[4], '')
end
return 1
