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
-- Commands about a thousand entries each: a command costs more than an entry, and Lua's stack has a limit.
for first = 1, #due, 1000 do
  local some, scores, holders = {unpack(due, first, math.min(first + 999, #due))}, {}, {}
  local failures = redis.call('hmget', attempts, unpack(some))
  local adopted_at = redis.call('zmscore', adopted, unpack(some))
  local registered_at = redis.call('zmscore', pending, unpack(some))
  for i, member in ipairs(some) do
    scores[2 * i - 1], scores[2 * i] = now + ARGV[3], member
    holders[2 * i - 1], holders[2 * i] = member, ARGV[1]
    table.insert(claimed, {member, failures[i] or 0, adopted_at[i] or '', registered_at[i] or ''})
  end
  -- Out of pending even when it came from deleting: it cannot complete any more.
  redis.call('zrem', pending, unpack(some))
  redis.call('zadd', deleting, unpack(scores))
  redis.call('hset', claims, unpack(holders))
end
return claimed
