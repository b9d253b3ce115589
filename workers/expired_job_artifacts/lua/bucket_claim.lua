-- Give an available bucket to an owner; return its number, or nil when none is free.
--
-- KEYS     available, occupied, owners, state: as `buckets.py` has them
-- ARGV[1]  max, the bucket's number will be below it
-- ARGV[2]  token, the owner's own, new for each claim
--
-- Buckets are given out in turn: if it were always the lowest, a single worker would never take another.

local available, occupied, owners, state = unpack(KEYS)
local max = tonumber(ARGV[1])
local last = tonumber(string.match(redis.call('hget', state, 'last_claimed') or '', '^%d%d?%d?$') or -1)
for step = 1, max do
  local number = (last + step) % max
  -- Taken out of both sets of a bucket that is in both: another program's leftover, and the owner is right.
  if redis.call('srem', available, number) == 1 and not redis.call('zscore', occupied, number) then
    redis.call('zadd', occupied, redis.call('time')[1], number)
    redis.call('hset', owners, number, ARGV[2])
    redis.call('hset', state, 'last_claimed', number)
    return number
  end
end
return nil
