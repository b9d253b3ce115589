-- Register objects that nothing names, unless the register names them already.
--
-- KEYS[1]    {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[2]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[3]    {pending_direct_uploads}:failed    sorted set, member by the epoch second of its last failure
-- KEYS[4]    {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1]    by how many seconds their registration lies ahead, so that they are stale that much later
-- ARGV[2..]  members
--
-- Returns how many were registered.  A caller that repeats itself after a lost reply registers none twice.

local now = redis.call('time')[1]
local adopted = 0
for i = 2, #ARGV do
  local member = ARGV[i]
  local known = redis.call('zscore', KEYS[1], member) or redis.call('zscore', KEYS[2], member)
  if not known and not redis.call('zscore', KEYS[3], member) then
    redis.call('zadd', KEYS[1], now + ARGV[1], member)
    redis.call('zadd', KEYS[4], now, member)
    adopted = adopted + 1
  end
end
return adopted
