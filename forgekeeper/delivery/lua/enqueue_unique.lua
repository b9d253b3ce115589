-- Enqueue a message, unless a message with this id is on its way already.
--
-- KEYS[1]  <namespace>:<queue>.DQ.msgs  hash, id -> body of messages that wait for their time
-- KEYS[2]  <namespace>:<queue>.msgs     hash, id -> body until the message is acknowledged
-- KEYS[3]  <namespace>:<queue>          list of ids, what workers fetch from
-- ARGV[1]  id
-- ARGV[2]  body
--
-- Returns 1 when the message was put in, 0 when one waits, is queued or is being worked on.
-- The body stays until the acknowledgement, so a caller that repeats itself after a lost
-- reply adds nothing.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('llen', KEYS[3])

if redis.call('hexists', KEYS[1], ARGV[1]) == 1 then
  return 0
end
if redis.call('hsetnx', KEYS[2], ARGV[1], ARGV[2]) == 0 then
  return 0
end
redis.call('rpush', KEYS[3], ARGV[1])
redis.pcall('publish', KEYS[3], '')
return 1
