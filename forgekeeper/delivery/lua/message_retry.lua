-- Let a message wait for its time: out of the worker's hands, into the delayed queue.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- KEYS[4]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- KEYS[5]  <namespace>:<queue>.DQ.msgs               hash, id -> body of messages that wait for their time
-- KEYS[6]  <namespace>:<queue>.DQ                    list of ids, what workers fetch from
-- ARGV[1]  id
-- ARGV[2]  body that was fetched
-- ARGV[3]  body for the delayed queue
--
-- Returns 1 when the message was in this worker's hands, 0 when it was not; then nothing was
-- changed, and whoever has it now decides what becomes of it.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[2])
redis.call('hlen', KEYS[3])
redis.call('hlen', KEYS[5])
redis.call('llen', KEYS[6])

if redis.call('hget', KEYS[4], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('srem', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('srem', KEYS[2], ARGV[1])
redis.call('hdel', KEYS[3], ARGV[1])
redis.call('hdel', KEYS[4], ARGV[1])
if redis.call('hsetnx', KEYS[5], ARGV[1], ARGV[3]) == 1 then
  redis.call('rpush', KEYS[6], ARGV[1])
  redis.pcall('publish', KEYS[6], '')
end
return 1
