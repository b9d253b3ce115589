-- Bring the buckets into order: below max each exists once, and none stays with an owner that has no heartbeat.
--
-- KEYS     available, occupied, owners, state: `BucketSet.keys`
-- ARGV[1]  max, how many buckets there shall be
-- ARGV[2]  seconds of silence after which an owner counts as dead
--
-- Returns {available, occupied, silent, missing}, as found before anything was changed.
-- An occupied bucket >= max is left to its owner until that releases it or expires: dropped at once and added again by
-- a scale-up, it would have two.  One without token is the reference implementation's, and is given the same time.

local available, occupied, owners, state = unpack(KEYS)
local max = tonumber(ARGV[1])
local now = tonumber(redis.call('time')[1])
local horizon = now - ARGV[2]

local found = {redis.call('scard', available), redis.call('zcard', occupied), 0, 0}

local exists = {}
for number = 0, max - 1 do
  exists[tostring(number)] = true
end

local owned = {}
local entries = redis.call('zrange', occupied, 0, -1, 'withscores')
for i = 1, #entries, 2 do
  local member, since = entries[i], tonumber(entries[i + 1])
  if not exists[member] and not string.match(member, '^[1-9]%d*$') then
    redis.call('zrem', occupied, member)
  elseif since <= horizon then
    found[3] = found[3] + 1
    redis.call('zrem', occupied, member)
    redis.call('sadd', available, member)
    owned[member] = 'until now'
  else
    owned[member] = 'still'
    if since > now then
      -- The clock was set back.  An owner who died then would be waited for until it has caught up.
      redis.call('zadd', occupied, now, member)
    end
  end
end

local free = {}
for _, member in ipairs(redis.call('smembers', available)) do
  if not exists[member] or owned[member] == 'still' then
    redis.call('srem', available, member)
  else
    free[member] = true
  end
end

for member in pairs(exists) do
  if not owned[member] and not free[member] then
    found[4] = found[4] + 1
    redis.call('sadd', available, member)
  end
end

for _, member in ipairs(redis.call('hkeys', owners)) do
  if owned[member] ~= 'still' then
    redis.call('hdel', owners, member)
  end
end

redis.call('hset', state, 'max_buckets', max)
return found
