-- Give an available bucket to an owner.
--
-- KEYS[1]  {bulk_delete_expired_job_artifacts}:available_buckets  set of numbers
-- KEYS[2]  {bulk_delete_expired_job_artifacts}:occupied_buckets   sorted set, number by second of its last heartbeat
-- KEYS[3]  {bulk_delete_expired_job_artifacts}:bucket_owners      hash, number -> token
-- KEYS[4]  {bulk_delete_expired_job_artifacts}:bucket_state       hash; `last_claimed` is written here and nowhere else
-- ARGV[1]  max, the bucket's number will be below it
-- ARGV[2]  token, the owner's own, new for each claim
--
-- Returns the number, or nil when none is free.
-- Buckets are given out in turn: if it were always the lowest, a single worker would take
-- bucket 0 each time, and never another.

local now = redis.call('time')[1]
local max = tonumber(ARGV[1])
local last = tonumber(string.match(redis.call('hget', KEYS[4], 'last_claimed') or '', '^%d%d?%d?$') or -1)
for step = 1, max do
  local number = (last + step) % max
  -- Taken out of both sets of a bucket that is in both: another program's leftover, and the owner is right.
  if redis.call('srem', KEYS[1], number) == 1 and not redis.call('zscore', KEYS[2], number) then
    redis.call('zadd', KEYS[2], now, number)
    redis.call('hset', KEYS[3], number, ARGV[2])
    redis.call('hset', KEYS[4], 'last_claimed', number)
    return number
  end
end
return nil
