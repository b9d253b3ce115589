-- Take adopted entries off the register, so that their objects stay.
--
-- KEYS[1]    {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[2]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[3]    {pending_direct_uploads}:failed    sorted set, member by the epoch second it was given up
-- KEYS[4]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[5]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- KEYS[6]    {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1..]  members
--
-- Returns for each member 1 when it was withdrawn, 0 when it is no adopted one, and -1 when a
-- claim holds it: its object is about to go.  A caller that repeats itself gets 0 for what is done.

local now = tonumber(redis.call('time')[1])
local function withdraw(member)
  if not redis.call('zscore', KEYS[6], member) then
    return 0
  end
  local registered = redis.call('zscore', KEYS[1], member)
  if registered and tonumber(registered) % 1 == 0 then
    redis.call('zrem', KEYS[6], member) -- a producer has taken the path over
    return 0
  end
  local again = redis.call('zscore', KEYS[2], member)
  if again and tonumber(again) > now and redis.call('hexists', KEYS[5], member) == 1 then
    return -1
  end
  local found = redis.call('zrem', KEYS[1], member)
    + redis.call('zrem', KEYS[2], member)
    + redis.call('zrem', KEYS[3], member)
  redis.call('hdel', KEYS[4], member)
  redis.call('hdel', KEYS[5], member)
  redis.call('zrem', KEYS[6], member)
  return math.min(found, 1)
end

local answers = {}
for i, member in ipairs(ARGV) do
  answers[i] = withdraw(member)
end
return answers
