-- Take messages from the head of a queue into a worker's hands.
--
-- KEYS[1]  <namespace>:<queue>                     list of ids, what workers fetch from
-- KEYS[2]  <namespace>:<queue>.msgs                hash, id -> body until the message is acknowledged
-- KEYS[3]  <namespace>:__acks__.<worker>.<queue>   set of ids that the worker has in hand
-- KEYS[4]  <namespace>:__heartbeats__              sorted set, worker by the millisecond of its last heartbeat
-- KEYS[5]  <namespace>:<queue>.XQ                  sorted set, id by the millisecond of its death
-- KEYS[6]  <namespace>:<queue>.XQ.msgs             hash, id -> body
-- KEYS[7]  <namespace>:<queue>.XQ.reasons          hash, id -> why it became a dead letter
-- ARGV[1]  worker
-- ARGV[2]  how many to take at most
-- ARGV[3]  how many bytes of id and body are too many
-- ARGV[4]  reason of what has more
--
-- Returns id, body, id, body, …  An id whose body is gone is dropped.  A message that is too large
-- becomes a dead letter; in its body's place is its size, and of its id the beginning is returned.
--
-- Taking from the list comes first: a Redis that is full lets a script go on whose first write
-- frees memory, so that queues can be drained when nothing can be sent any more.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('hlen', KEYS[2])
redis.call('scard', KEYS[3])
redis.call('zcard', KEYS[4])
redis.call('zcard', KEYS[5])
redis.call('hlen', KEYS[6])
redis.call('hlen', KEYS[7])

local answer = {}
while #answer < 2 * ARGV[2] do
  local id = redis.call('lpop', KEYS[1])
  if not id then
    break
  end
  local body = redis.call('hget', KEYS[2], id)
  if body and #id + #body > tonumber(ARGV[3]) then
    local time = redis.call('time')
    redis.call('zadd', KEYS[5], time[1] * 1000 + math.floor(time[2] / 1000), id)
    redis.call('hset', KEYS[6], id, body)
    redis.call('hset', KEYS[7], id, ARGV[4])
    redis.call('hdel', KEYS[2], id)
    answer[#answer + 1] = string.sub(id, 1, 200)
    answer[#answer + 1] = #id + #body
  elseif body then
    redis.call('sadd', KEYS[3], id)
    answer[#answer + 1] = id
    answer[#answer + 1] = body
  end
end
if #answer > 0 then
  -- Whoever has something in hand must be among those that are found expired.
  local now = redis.call('time')
  redis.call('zadd', KEYS[4], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
end
return answer
