-- Note that a worker starts on messages, on each unless it has been taken from it.
--
-- KEYS[1]  <namespace>:__acks__.<worker>.<queue>     set of ids that the worker has in hand
-- KEYS[2]  <namespace>:__started__.<worker>.<queue>  set of ids that it has started on
-- KEYS[3]  <namespace>:<queue>.starts                hash, id -> starts without an orderly end
-- ARGV     id, 1 when a start that does not end counts as a death or 0 when another keeps the count; and so on
--
-- Returns a string with a digit for each message: 1 when it may be worked on, 0 when it is no longer in
-- this worker's hands.

local answer = {}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  if redis.call('sismember', KEYS[1], id) == 0 then
    answer[#answer + 1] = '0'
  else
    -- A write that needs no memory comes first: a full Redis then lets the others pass.
    redis.call('srem', KEYS[2], id)
    redis.call('sadd', KEYS[2], id)
    if ARGV[i + 1] == '1' then
      if not string.match(redis.call('hget', KEYS[3], id) or '0', '^%d%d?%d?%d?$') then
        redis.call('hdel', KEYS[3], id) -- no count, and one that could not be raised
      end
      redis.call('hincrby', KEYS[3], id, 1)
    end
    answer[#answer + 1] = '1'
  end
end
return table.concat(answer)
