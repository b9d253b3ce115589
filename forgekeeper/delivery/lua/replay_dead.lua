-- Put a dead letter back into its queue, unless a message with its id is on its way already.
--
-- KEYS[1]  <namespace>:<queue>.XQ          sorted set, id by the millisecond of its death
-- KEYS[2]  <namespace>:<queue>.XQ.msgs     hash, id -> body
-- KEYS[3]  <namespace>:<queue>.XQ.reasons  hash, id -> why it became a dead letter
-- KEYS[4]  <namespace>:<queue>.DQ.msgs     hash, id -> body of messages that wait for their time
-- KEYS[5]  <namespace>:<queue>.msgs        hash, id -> body until the message is acknowledged
-- KEYS[6]  <namespace>:<queue>             list of ids, what workers fetch from
-- ARGV[1]  id among the dead letters
-- ARGV[2]  body that the caller has seen there
-- ARGV[3]  id of the message
-- ARGV[4]  body that goes into the queue
--
-- Returns 'replayed'; 'on its way' when a message with that id waits, is queued or is being worked
-- on; 'gone' when the letter is no longer what the caller has seen.  Then nothing was changed.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('zcard', KEYS[1])
redis.call('hlen', KEYS[3])
redis.call('llen', KEYS[6])

if redis.call('hget', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 'gone'
end
if redis.call('hexists', KEYS[4], ARGV[3]) == 1 then
  return 'on its way'
end
if redis.call('hsetnx', KEYS[5], ARGV[3], ARGV[4]) == 0 then
  return 'on its way'
end
redis.call('rpush', KEYS[6], ARGV[3])
redis.pcall('publish', KEYS[6], '')
redis.call('zrem', KEYS[1], ARGV[1])
redis.call('hdel', KEYS[2], ARGV[1])
redis.call('hdel', KEYS[3], ARGV[1])
return 'replayed'
