-- Give a bucket to an owner; return its number, or nil if none is free.
--
-- KEYS     available, occupied, owners, state: `BucketSet.keys`
-- ARGV[1]  max, the bucket's number will be below it
-- ARGV[2]  token, new for each claim: the key of the owner's child, if it has one, and 32 hexadecimal digits
--
-- A child that is started again takes the bucket of its earlier start, whose worker has died or counts as dead.  If the
-- earlier start still works, its next heartbeat says 'bucket_lost'.
-- Other buckets are given out in turn: if it were always the lowest, a single worker would never take another.

local available, occupied, owners, state = unpack(KEYS)
local max, token = tonumber(ARGV[1]), ARGV[2]

local function give(number)
  redis.call('zadd', occupied, redis.call('time')[1], number)
  redis.call('hset', owners, number, token)
  return number
end

local child = string.sub(token, 1, -33)
for number = 0, max - 1 do
  local owner = child ~= '' and redis.call('hget', owners, number)
  if owner and string.sub(owner, 1, -33) == child and redis.call('zscore', occupied, number) then
    return give(number)
  end
end

local last = tonumber(string.match(redis.call('hget', state, 'last_claimed') or '', '^%d%d?%d?$') or -1)
for step = 1, max do
  local number = (last + step) % max
  -- Taken out of both sets of a bucket that is in both: another program's leftover, and the owner is right.
  if redis.call('srem', available, number) == 1 and not redis.call('zscore', occupied, number) then
    redis.call('hset', state, 'last_claimed', number)
    return give(number)
  end
end
return nil
