-- Take adopted entries off the register, so that their objects stay.
--
-- KEYS[1]    {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[2]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[3]    {pending_direct_uploads}:failed    sorted set, member by the epoch second of its last failure
-- KEYS[4]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[5]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- KEYS[6]    {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1..]  members
--
-- Returns for each member 1 when it was withdrawn, 0 when it is no adopted one, and -1 when a
-- claim holds it: its object is about to go.  A repeated call returns 0 for what is done.

local now = tonumber(redis.call('time')[1])
local answers = {}
for i, member in ipairs(ARGV) do
  local again = tonumber(redis.call('zscore', KEYS[2], member) or 0)
  if not redis.call('zscore', KEYS[6], member) then
    answers[i] = 0
  elseif again > now and redis.call('hexists', KEYS[5], member) == 1 then
    answers[i] = -1
  else
    local found = redis.call('zrem', KEYS[1], member)
      + redis.call('zrem', KEYS[2], member)
      + redis.call('zrem', KEYS[3], member)
    redis.call('hdel', KEYS[4], member)
    redis.call('hdel', KEYS[5], member)
    redis.call('zrem', KEYS[6], member)
    answers[i] = math.min(found, 1)
  end
end
return answers
