-- Settle entries, but only those that the claim still holds.
--
-- KEYS[1]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[2]    {pending_direct_uploads}:failed    sorted set, member by the epoch second of its last failure
-- KEYS[3]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[4]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- KEYS[5]    {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1]    token of the claim
-- ARGV[2]    'forget': drop the entry; 'put_back': it is due at once; 'fail': count a failed attempt
-- ARGV[3]    of 'fail': after how many attempts the entry moves to failed
-- ARGV[4]    of 'fail': how long to wait after the first attempt, in seconds; doubled after each further one
-- ARGV[5..]  members
--
-- Returns how many were settled; of 'fail', how many are in failed now.  A call that is repeated after a lost reply
-- changes nothing more.

local now = redis.call('time')[1]

local function fail(member)
  if not string.match(redis.call('hget', KEYS[3], member) or '0', '^%d%d?%d?%d?$') then
    redis.call('hdel', KEYS[3], member) -- no count, and one that could not be raised
  end
  local attempts = redis.call('hincrby', KEYS[3], member, 1)
  if attempts >= tonumber(ARGV[3]) then
    redis.call('zrem', KEYS[1], member)
    redis.call('zadd', KEYS[2], now, member)
  else
    redis.call('zadd', KEYS[1], now + ARGV[4] * 2 ^ (attempts - 1), member)
  end
end

local settled = 0
for i = 5, #ARGV do
  local member = ARGV[i]
  if redis.call('hget', KEYS[4], member) == ARGV[1] then
    redis.call('hdel', KEYS[4], member)
    settled = settled + 1
    if ARGV[2] == 'fail' then
      fail(member)
    elseif ARGV[2] == 'put_back' then
      redis.call('zadd', KEYS[1], now, member)
    else
      redis.call('zrem', KEYS[1], member)
      redis.call('hdel', KEYS[3], member)
      redis.call('zrem', KEYS[5], member)
    end
  end
end
if ARGV[2] ~= 'fail' then
  return settled
end
local failed = 0
for i = 5, #ARGV do
  if redis.call('zscore', KEYS[2], ARGV[i]) then
    failed = failed + 1
  end
end
return failed
