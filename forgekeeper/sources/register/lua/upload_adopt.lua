-- Register objects that nothing names, unless the register names them already; return how many are new.
--
-- KEYS       pending, deleting, failed, adopted: see `RegisterKeys`; and the forge's own register, if it is read
-- ARGV[1]    seconds that their registration is ahead, so that they are stale that much later
-- ARGV[2..]  members
--
-- A caller that repeats itself after a lost reply registers none twice.

local pending, deleting, failed, adopted, theirs = unpack(KEYS)
local now = redis.call('time')[1]
local count = 0
for i = 2, #ARGV do
  local member = ARGV[i]
  local known = redis.call('zscore', pending, member) or redis.call('zscore', deleting, member)
  known = known or theirs and redis.call('hexists', theirs, member) == 1
  if not known and not redis.call('zscore', failed, member) then
    -- Half a second more, which no producer writes: by that scripts of the version before tell an adopted entry.
    redis.call('zadd', pending, now + ARGV[1] + 0.5, member)
    redis.call('zadd', adopted, now, member)
    count = count + 1
  end
end
return count
