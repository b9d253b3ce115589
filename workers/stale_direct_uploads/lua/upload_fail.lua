-- Count a failed attempt for each entry, but only while the claim still holds it; give up the last.
--
-- KEYS[1]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[2]    {pending_direct_uploads}:failed    sorted set, member by the epoch second it was given up
-- KEYS[3]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[4]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- ARGV[1]    token of the claim
-- ARGV[2]    after how many attempts to give up
-- ARGV[3]    how long to wait after the first attempt, in seconds; doubled after each further one
-- ARGV[4..]  members
--
-- Returns how many of them lie in failed now.  The claim ends with the attempt, so a caller
-- that repeats itself after a lost reply counts none twice and gets the same answer.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('zcard', KEYS[1])
redis.call('zcard', KEYS[2])
redis.call('hlen', KEYS[3])

local now = redis.call('time')[1]
local given_up = 0
for i = 4, #ARGV do
  local member = ARGV[i]
  if redis.call('hget', KEYS[4], member) == ARGV[1] then
    redis.call('hdel', KEYS[4], member)
    if not string.match(redis.call('hget', KEYS[3], member) or '0', '^%d%d?%d?%d?$') then
      redis.call('hdel', KEYS[3], member) -- no count, and one that could not be raised
    end
    local attempts = redis.call('hincrby', KEYS[3], member, 1)
    if attempts >= tonumber(ARGV[2]) then
      redis.call('zrem', KEYS[1], member)
      redis.call('zadd', KEYS[2], now, member)
    else
      redis.call('zadd', KEYS[1], now + ARGV[3] * 2 ^ (attempts - 1), member)
    end
  end
  if redis.call('zscore', KEYS[2], member) then
    given_up = given_up + 1
  end
end
return given_up
