-- End a message: it is done.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- KEYS[4]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- ARGV[1]  id
-- ARGV[2]  body that was fetched, or '' for any: ids are used again, and an acknowledgement
--          repeated after a lost reply must not end the next message of that id
--
-- Returns 1 when the message was in this worker's hands, 0 when it was not; then nothing was changed.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[2])
redis.call('hlen', KEYS[3])
redis.call('hlen', KEYS[4])

if ARGV[2] ~= '' and redis.call('hget', KEYS[4], ARGV[1]) ~= ARGV[2] then
  return 0
end
if redis.call('srem', KEYS[1], ARGV[1]) == 0 then
  return 0
end
redis.call('srem', KEYS[2], ARGV[1])
redis.call('hdel', KEYS[3], ARGV[1])
redis.call('hdel', KEYS[4], ARGV[1])
return 1
