-- Claim entries that are due; a thousand take about a millisecond of the server.
--
-- KEYS     the set to take from; pending, deleting, attempts, claims, adopted: see `RegisterKeys`
-- ARGV[1]  token of this claim
-- ARGV[2]  how long past its score an entry is due, in seconds
-- ARGV[3]  how long no other claim gets it, in seconds
-- ARGV[4]  how many to claim at most
-- ARGV[5..] if given, only these
--
-- Returns {member, attempts, second of its adoption or '', second of its registration or ''} of each.  A call that is
-- repeated after a lost reply gets other entries; the first are due again when their visibility has passed.

local source, pending, deleting, attempts, claims, adopted = unpack(KEYS)
local now = redis.call('time')[1]
local due, claimed = {}, {}
for i = 5, #ARGV do
  local score = redis.call('zscore', source, ARGV[i])
  if score and tonumber(score) <= now - ARGV[2] then
    table.insert(due, ARGV[i])
  end
end
if #ARGV < 5 then
  due = redis.call('zrangebyscore', source, '-inf', now - ARGV[2], 'limit', 0, ARGV[4])
end
for _, member in ipairs(due) do
  local failures = redis.call('hget', attempts, member) or 0
  local adopted_at = redis.call('zscore', adopted, member) or ''
  local registered_at = redis.call('zscore', pending, member) or ''
  -- Out of pending even when it came from deleting: it cannot complete any more.
  redis.call('zrem', pending, member)
  redis.call('zadd', deleting, now + ARGV[3], member)
  redis.call('hset', claims, member, ARGV[1])
  table.insert(claimed, {member, failures, adopted_at, registered_at})
end
return claimed
