-- Remove a dead letter.
--
-- KEYS[1]  <namespace>:<queue>.XQ          sorted set, id by the millisecond of its death
-- KEYS[2]  <namespace>:<queue>.XQ.msgs     hash, id -> body
-- KEYS[3]  <namespace>:<queue>.XQ.reasons  hash, id -> why it became a dead letter
-- ARGV[1]  id
-- ARGV[2]  body that the caller has seen there, or '' for none
-- ARGV[3]  size of the body, where the caller has seen no more of it; else 0
--
-- Returns 1 when it was removed, 0 when it is no longer what the caller has seen; then nothing was changed.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('zcard', KEYS[1])
redis.call('hlen', KEYS[3])

if tonumber(ARGV[3]) > 0 then
  if redis.call('hstrlen', KEYS[2], ARGV[1]) ~= tonumber(ARGV[3]) then
    return 0
  end
elseif (redis.call('hget', KEYS[2], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
redis.call('hdel', KEYS[2], ARGV[1])
redis.call('hdel', KEYS[3], ARGV[1])
return redis.call('zrem', KEYS[1], ARGV[1])
