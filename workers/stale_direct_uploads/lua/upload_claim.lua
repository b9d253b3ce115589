-- Claim entries that are due; a thousand take about a millisecond of the server.
--
-- KEYS[1]  the set to take from, KEYS[2] or KEYS[3]
-- KEYS[2]  {pending_direct_uploads}:pending   sorted set, <location>:<path> by the epoch second of its registration
-- KEYS[3]  {pending_direct_uploads}:deleting  sorted set, member by the epoch second of its next try
-- KEYS[4]  {pending_direct_uploads}:attempts  hash, member -> how often its deletion has failed
-- KEYS[5]  {pending_direct_uploads}:claims    hash, member -> token of the claim that holds it
-- KEYS[6]  {pending_direct_uploads}:adopted   sorted set, member by the epoch second of its adoption
-- ARGV[1]  token of this claim
-- ARGV[2]  how long past its score an entry is due, in seconds
-- ARGV[3]  how long no other claim gets it, in seconds
-- ARGV[4]  how many to claim at most
--
-- Returns {member, attempts, second of its adoption or '', second of its registration or ''} of each.  A call that is
-- repeated after a lost reply gets other entries; the first are due again when their visibility has passed.

local now = redis.call('time')[1]
local claimed = {}
for _, member in ipairs(redis.call('zrangebyscore', KEYS[1], '-inf', now - ARGV[2], 'limit', 0, ARGV[4])) do
  local registered = redis.call('zscore', KEYS[2], member) or ''
  local adopted = redis.call('zscore', KEYS[6], member) or ''
  local attempts = redis.call('hget', KEYS[4], member) or 0
  -- Out of pending even when it came from deleting: it cannot complete any more.
  redis.call('zrem', KEYS[2], member)
  redis.call('zadd', KEYS[3], now + ARGV[3], member)
  redis.call('hset', KEYS[5], member, ARGV[1])
  table.insert(claimed, {member, attempts, adopted, registered})
end
return claimed
