-- Bring the buckets into order: below max each exists once, and none stays with an owner that has no heartbeat.
--
-- KEYS[1]  {bulk_delete_expired_job_artifacts}:available_buckets  set of numbers
-- KEYS[2]  {bulk_delete_expired_job_artifacts}:occupied_buckets   sorted set, number by second of its last heartbeat
-- KEYS[3]  {bulk_delete_expired_job_artifacts}:bucket_owners      hash, number -> token
-- KEYS[4]  {bulk_delete_expired_job_artifacts}:bucket_state       hash; `max_buckets` is written here and nowhere else
-- ARGV[1]  max, how many buckets there shall be
-- ARGV[2]  seconds of silence after which an owner counts as dead
--
-- Returns {available, occupied, silent, missing}, as found before anything was changed.
-- An occupied bucket >= max is left to its owner until that releases it or expires: dropped
-- at once and added again by a scale-up, it would have two.  An occupied bucket without token
-- is the reference implementation's, and is given the same time.

local max = tonumber(ARGV[1])
local now = tonumber(redis.call('time')[1])
local horizon = now - ARGV[2]

local found = {redis.call('scard', KEYS[1]), redis.call('zcard', KEYS[2]), 0, 0}

local exists = {}
for number = 0, max - 1 do
  exists[tostring(number)] = true
end

local occupied = {}
local entries = redis.call('zrange', KEYS[2], 0, -1, 'withscores')
for i = 1, #entries, 2 do
  local member, since = entries[i], tonumber(entries[i + 1])
  if not exists[member] and not string.match(member, '^[1-9]%d*$') then
    redis.call('zrem', KEYS[2], member)
  elseif since <= horizon then
    found[3] = found[3] + 1
    redis.call('zrem', KEYS[2], member)
    redis.call('sadd', KEYS[1], member)
    occupied[member] = 'until now'
  else
    occupied[member] = 'still'
    if since > now then
      -- The clock was set back.  An owner who died then would be waited for until it has caught up.
      redis.call('zadd', KEYS[2], now, member)
    end
  end
end

local available = {}
for _, member in ipairs(redis.call('smembers', KEYS[1])) do
  if not exists[member] or occupied[member] == 'still' then
    redis.call('srem', KEYS[1], member)
  else
    available[member] = true
  end
end

for member in pairs(exists) do
  if not occupied[member] and not available[member] then
    found[4] = found[4] + 1
    redis.call('sadd', KEYS[1], member)
  end
end

for _, member in ipairs(redis.call('hkeys', KEYS[3])) do
  if occupied[member] ~= 'still' then
    redis.call('hdel', KEYS[3], member)
  end
end

redis.call('hset', KEYS[4], 'max_buckets', max)
return found
