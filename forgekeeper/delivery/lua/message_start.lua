-- Note that a worker starts on a message, unless the message has been taken from it.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- ARGV[1]  id
-- ARGV[2]  1 when a start that does not end counts as a death, 0 when another keeps the count
--
-- Returns 1 when the message may be worked on, 0 when it is no longer in this worker's hands.

if redis.call('sismember', KEYS[1], ARGV[1]) == 0 then
  return 0
end
-- A write that needs no memory comes first: a full Redis then lets the others pass.
redis.call('srem', KEYS[2], ARGV[1])
redis.call('sadd', KEYS[2], ARGV[1])
if ARGV[2] == '1' then
  if not string.match(redis.call('hget', KEYS[3], ARGV[1]) or '0', '^%d%d?%d?%d?$') then
    redis.call('hdel', KEYS[3], ARGV[1]) -- no count, and one that could not be raised
  end
  redis.call('hincrby', KEYS[3], ARGV[1], 1)
end
return 1
