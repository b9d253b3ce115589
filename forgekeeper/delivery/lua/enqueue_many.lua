-- Enqueue messages, each unless a message with its id is on its way already.
--
-- KEYS[1]  <namespace>:<queue>.DQ.msgs  hash, id -> body of messages that wait for their time
-- KEYS[2]  <namespace>:<queue>.msgs     hash, id -> body until the message is acknowledged
-- KEYS[3]  <namespace>:<queue>          list of ids, what workers fetch from
-- ARGV[1]  id, body, id, body, …, each after four bytes that say its length, the high one first; a few thousand at
--          most: the new ids have to fit on Lua's stack.  As one argument, because a client sends thousands of small
--          ones in fifty pieces, and Redis makes an object of each
--
-- Returns a string with a digit for each message: 1 when it was put in, 0 when one waits, is
-- queued or is being worked on.  For each message this is what enqueue_unique does.

local some_wait = redis.call('hlen', KEYS[1]) > 0
local new, answer = {}, {}
local all, position = ARGV[1], 1
while position <= #all do
  local id, body
  id, body, position = struct.unpack('>I4c0I4c0', all, position)
  if some_wait and redis.call('hexists', KEYS[1], id) == 1 then
    answer[#answer + 1] = '0'
  elseif redis.call('hsetnx', KEYS[2], id, body) == 0 then
    answer[#answer + 1] = '0'
  else
    answer[#answer + 1] = '1'
    new[#new + 1] = id
  end
end
if #new > 0 then
  redis.call('rpush', KEYS[3], unpack(new))
  redis.pcall('publish', KEYS[3], '')
end
return table.concat(answer)
