-- Give entries back untried, due at once, but only while the claim still holds them.
--
-- KEYS[1]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[2]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- ARGV[1]    token of the claim
-- ARGV[2..]  members
--
-- Returns how many were given back; one that was given back already, or is another's, is not.

local now = redis.call('time')[1]
local given = 0
for i = 2, #ARGV do
  if redis.call('hget', KEYS[2], ARGV[i]) == ARGV[1] then
    redis.call('zadd', KEYS[1], now, ARGV[i])
    redis.call('hdel', KEYS[2], ARGV[i])
    given = given + 1
  end
end
return given
