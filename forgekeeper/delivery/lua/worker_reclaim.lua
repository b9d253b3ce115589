-- Reclaim the messages of one queue out of the hands of an expired worker, a bounded number of them.
--
-- KEYS[1]  <namespace>:__heartbeats__                sorted set, worker by the millisecond of its last heartbeat
-- KEYS[2]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[3]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[4]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- KEYS[5]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- KEYS[6]  <namespace>:<queue>                       list of ids, what workers fetch from
-- KEYS[7]  <namespace>:<queue>.XQ                    sorted set, id by the millisecond of its death
-- KEYS[8]  <namespace>:<queue>.XQ.msgs               hash, id -> body
-- KEYS[9]  <namespace>:<queue>.XQ.reasons            hash, id -> why it became a dead letter
-- ARGV[1]  worker
-- ARGV[2]  how long is too long, in milliseconds
-- ARGV[3]  how many starts without an end make a message a dead letter
-- ARGV[4]  how many to take at most
-- ARGV[5]  how many bytes of a body are too many to be returned
--
-- Returns how many were taken, all told, and id and body, or '', of each that became a dead letter;
-- the others are at the head of the queue.  A worker that has given a heartbeat meanwhile keeps its own.

local time = redis.call('time')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = redis.call('zscore', KEYS[1], ARGV[1])
if not last or tonumber(last) >= now - ARGV[2] then
  return {0}
end

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[3])
redis.call('hlen', KEYS[4])
redis.call('hlen', KEYS[5])
redis.call('llen', KEYS[6])
redis.call('zcard', KEYS[7])
redis.call('hlen', KEYS[8])
redis.call('hlen', KEYS[9])

local answer = {0}
for _, id in ipairs(redis.call('spop', KEYS[2], ARGV[4])) do
  answer[1] = answer[1] + 1
  local started = redis.call('srem', KEYS[3], id) == 1
  local body = redis.call('hget', KEYS[5], id)
  if not body then
    redis.call('hdel', KEYS[4], id)
  elseif started and (tonumber(redis.call('hget', KEYS[4], id) or 0) or 0) >= tonumber(ARGV[3]) then
    redis.call('hdel', KEYS[4], id)
    redis.call('hdel', KEYS[5], id)
    redis.call('zadd', KEYS[7], now, id)
    redis.call('hset', KEYS[8], id, body)
    redis.call('hset', KEYS[9], id, 'poison')
    answer[#answer + 1] = id
    answer[#answer + 1] = #body > tonumber(ARGV[5]) and '' or body
  else
    redis.call('lpush', KEYS[6], id)
  end
end
if answer[1] > 0 then
  redis.pcall('publish', KEYS[6], '')
end
return answer
