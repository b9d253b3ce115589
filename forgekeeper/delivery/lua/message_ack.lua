-- End messages: they are done.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- KEYS[4]  <namespace>:<queue>.msgs                  hash, id -> body until the message is acknowledged
-- ARGV     id, body that was fetched or '' for any, and so on: ids are used again, and an acknowledgement
--          repeated after a lost reply must not end the next message of that id
--
-- Returns a string with a digit for each message: 1 when it was in this worker's hands, 0 when it was not;
-- then nothing of it was changed.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('scard', KEYS[1])
redis.call('scard', KEYS[2])
redis.call('hlen', KEYS[3])
redis.call('hlen', KEYS[4])

local answer = {}
for i = 1, #ARGV, 2 do
  local id, body = ARGV[i], ARGV[i + 1]
  local ours = body == '' or redis.call('hget', KEYS[4], id) == body
  if ours and redis.call('srem', KEYS[1], id) == 1 then
    redis.call('srem', KEYS[2], id)
    redis.call('hdel', KEYS[3], id)
    redis.call('hdel', KEYS[4], id)
    answer[#answer + 1] = '1'
  else
    answer[#answer + 1] = '0'
  end
end
return table.concat(answer)
