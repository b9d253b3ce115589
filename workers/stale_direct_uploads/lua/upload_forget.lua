-- Drop entries from the register, but only while the claim still holds them.
--
-- KEYS[1]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[2]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[3]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- KEYS[4]    {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1]    token of the claim
-- ARGV[2..]  members
--
-- Returns how many were dropped; one that was dropped already, or is another's, is not.

local dropped = 0
for i = 2, #ARGV do
  if redis.call('hget', KEYS[3], ARGV[i]) == ARGV[1] then
    redis.call('zrem', KEYS[1], ARGV[i])
    redis.call('hdel', KEYS[2], ARGV[i])
    redis.call('hdel', KEYS[3], ARGV[i])
    redis.call('zrem', KEYS[4], ARGV[i])
    dropped = dropped + 1
  end
end
return dropped
