-- Claim entries that are due, looking at a thousand at most, which takes about a millisecond of the server.
--
-- KEYS[1]    the set to take from, KEYS[2] or KEYS[3]
-- KEYS[2]    {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[3]    {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[4]    {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[5]    {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- KEYS[6]    {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1]    token of this claim
-- ARGV[2]    how long past its score an entry is due, in seconds
-- ARGV[3]    how long no other claim gets it, in seconds
-- ARGV[4]    how many to claim at most
-- ARGV[5]    the rank to begin at: 0, or what the last call returned
-- ARGV[6..]  locations to skip
--
-- Returns the rank to go on at, -1 when nothing due lies beyond, and then {member, attempts, second of its adoption or
-- '', second of its registration or ''} of each claimed entry.  A call that is repeated after a lost reply gets other
-- entries; the first are due again when their visibility has passed.

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

local claimed = {}
for _, member in ipairs(page) do
  if #claimed == tonumber(ARGV[4]) then
    break
  end
  if skipped[string.match(member, '^[^:]*')] then
    rank = rank + 1
  else
    local registered = redis.call('zscore', KEYS[2], member) or ''
    local adopted = redis.call('zscore', KEYS[6], member) or ''
    local attempts = redis.call('hget', KEYS[4], member) or 0
    -- Out of pending even when it came from deleting: it cannot complete any more.
    redis.call('zrem', KEYS[2], member)
    redis.call('zadd', KEYS[3], now + ARGV[3], member)
    redis.call('hset', KEYS[5], member, ARGV[1])
    table.insert(claimed, {member, attempts, adopted, registered})
  end
end
return {last + 1 < due and rank or -1, unpack(claimed)}
