-- Dead-letter a message.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- KEYS[4]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- KEYS[5]  <namespace>:<queue>.XQ                    sorted set, id by the millisecond of its death
-- KEYS[6]  <namespace>:<queue>.XQ.msgs               hash, id -> body
-- KEYS[7]  <namespace>:<queue>.XQ.reasons            hash, id -> why it became a dead letter
-- ARGV[1]  id
-- ARGV[2]  body that was fetched, or '' for any
-- ARGV[3]  reason
--
-- Returns 1 when the message was in this worker's hands, 0 when it was not; then nothing was changed.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[1])
redis.call('scard', KEYS[2])
redis.call('hlen', KEYS[3])
redis.call('zcard', KEYS[5])
redis.call('hlen', KEYS[6])
redis.call('hlen', KEYS[7])

local body = redis.call('hget', KEYS[4], ARGV[1])
if not body or (ARGV[2] ~= '' and body ~= ARGV[2]) then
  return 0
end
if redis.call('srem', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('srem', KEYS[2], ARGV[1])
redis.call('hdel', KEYS[3], ARGV[1])
redis.call('hdel', KEYS[4], ARGV[1])
local now = redis.call('time')
redis.call('zadd', KEYS[5], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
redis.call('hset', KEYS[6], ARGV[1], body)
redis.call('hset', KEYS[7], ARGV[1], ARGV[3])
return 1
