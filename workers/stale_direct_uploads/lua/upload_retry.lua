-- Retry entries that have failed: at once, and with all their attempts.
--
-- KEYS[1]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[2]    {pending_direct_uploads}:failed    sorted set, member by the epoch second of its last failure
-- KEYS[3]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[4]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- ARGV[1..]  members
--
-- Returns how many of them had failed.  One that a claim holds is left to it.

local now = redis.call('time')[1]
local retried = 0
for _, member in ipairs(ARGV) do
  local waits = redis.call('hexists', KEYS[3], member) == 1 and redis.call('hexists', KEYS[4], member) == 0
  if redis.call('zrem', KEYS[2], member) == 1 or waits and redis.call('zscore', KEYS[1], member) then
    redis.call('zadd', KEYS[1], now, member)
    redis.call('hdel', KEYS[3], member)
    retried = retried + 1
  end
end
return retried
