-- Claim entries that are due, looking at a thousand at most: a millisecond of everybody's time.
--
-- KEYS[1]    the set to take from, KEYS[2] or KEYS[3]
-- KEYS[2]    {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[3]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[4]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[5]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- KEYS[6]    {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1]    token of this claim
-- ARGV[2]    how long past its score an entry is due, in seconds
-- ARGV[3]    how long nobody else gets it, in seconds
-- ARGV[4]    how many to claim at most
-- ARGV[5]    the rank to begin at: 0, or what the last call returned
-- ARGV[6..]  locations to pass over
--
-- Returns the rank to go on at, -1 when nothing due lies beyond, and then {member, attempts,
-- second of its adoption or '', second of its registration or ''} of each claimed entry.  A caller that repeats itself
-- after a lost reply gets other entries; the first come back in their time.

-- A key of another type is an error, and must be one before anything has changed: nothing is rolled back.
redis.call('zcard', KEYS[3])
redis.call('hlen', KEYS[4])
redis.call('hlen', KEYS[5])
redis.call('zcard', KEYS[6])

local now = redis.call('time')[1]
local rank = tonumber(ARGV[5])
local due = redis.call('zcount', KEYS[1], '-inf', now - ARGV[2])
if rank >= due then
  return {-1} -- and no range may end at -1, which would be the last entry of all
end
local last = math.min(rank + 1000, due) - 1
local page = redis.call('zrange', KEYS[1], rank, last)

local skipped = {}
for i = 6, #ARGV do
  skipped[ARGV[i]] = true
end

-- When a claimed entry was adopted.  A producer's score is a whole second: with one the
-- producer has taken the path over, without telling.
local any_adopted = redis.call('zcard', KEYS[6]) > 0
local function adopted_at(member)
  if not any_adopted then
    return ''
  end
  local score = redis.call('zscore', KEYS[2], member)
  if score and tonumber(score) % 1 == 0 then
    redis.call('zrem', KEYS[6], member)
  end
  return redis.call('zscore', KEYS[6], member) or ''
end

local claimed = {}
for _, member in ipairs(page) do
  if #claimed == tonumber(ARGV[4]) then
    break
  end
  if skipped[string.match(member, '^[^:]*')] then
    rank = rank + 1
  else
    local adopted = adopted_at(member)
    local registered = redis.call('zscore', KEYS[2], member) or ''
    -- Out of pending even when it came from deleting: whatever others wrote, it cannot complete now.
    redis.call('zrem', KEYS[2], member)
    redis.call('zadd', KEYS[3], now + ARGV[3], member)
    redis.call('hset', KEYS[5], member, ARGV[1])
    table.insert(claimed, {member, redis.call('hget', KEYS[4], member) or 0, adopted, registered})
  end
end
return {last + 1 < due and rank or -1, unpack(claimed)}
