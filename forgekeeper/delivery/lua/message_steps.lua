-- Take steps of messages, in their order: end those that are done, note that a worker starts on others.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- KEYS[4]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- ARGV     three for each step:
--            'ack', id, body that was fetched or '' for any: ids are used again, and an acknowledgement repeated
--              after a lost reply must not end the next message of that id
--            'start', id, 1 when a start that does not end counts as a death or 0 when another keeps the count
--
-- Returns a string with a digit for each step: 1 when its message was in this worker's hands, 0 when it was not;
-- then nothing of it was changed, and it may not be worked on.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[1])
redis.call('scard', KEYS[2])
redis.call('hlen', KEYS[3])
redis.call('hlen', KEYS[4])

local function ack(id, body)
  if (body ~= '' and redis.call('hget', KEYS[4], id) ~= body) or redis.call('srem', KEYS[1], id) == 0 then
    return '0'
  end
  redis.call('srem', KEYS[2], id)
  redis.call('hdel', KEYS[3], id)
  redis.call('hdel', KEYS[4], id)
  return '1'
end

local function start(id, counted)
  if redis.call('sismember', KEYS[1], id) == 0 then
    return '0'
  end
  -- A write that needs no memory comes first: a full Redis then lets the others pass.
  redis.call('srem', KEYS[2], id)
  redis.call('sadd', KEYS[2], id)
  if counted == '1' then
    if not string.match(redis.call('hget', KEYS[3], id) or '0', '^%d%d?%d?%d?$') then
      redis.call('hdel', KEYS[3], id) -- no count, and one that could not be raised
    end
    redis.call('hincrby', KEYS[3], id, 1)
  end
  return '1'
end

local take = { ack = ack, start = start }
local answer = {}
for i = 1, #ARGV, 3 do
  answer[#answer + 1] = take[ARGV[i]](ARGV[i + 1], ARGV[i + 2])
end
return table.concat(answer)
