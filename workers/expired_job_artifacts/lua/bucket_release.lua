-- Take a bucket back from its owner, but only while it is still its own.
--
-- KEYS[1]  {bulk_delete_expired_job_artifacts}:available_buckets  set of numbers
-- KEYS[2]  {bulk_delete_expired_job_artifacts}:occupied_buckets   sorted set, number by second of its last heartbeat
-- KEYS[3]  {bulk_delete_expired_job_artifacts}:bucket_owners      hash, number -> token
-- KEYS[4]  {bulk_delete_expired_job_artifacts}:bucket_state       hash, `max_buckets` as the last tidying had it
-- ARGV[1]  number
-- ARGV[2]  token
--
-- Returns 1 when it was released, 0 when it was not its own any more.  A bucket that exists no
-- longer is dropped instead of made available.

if redis.call('hget', KEYS[3], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('hdel', KEYS[3], ARGV[1])
redis.call('zrem', KEYS[2], ARGV[1])
local max = tonumber(redis.call('hget', KEYS[4], 'max_buckets'))
if not max or tonumber(ARGV[1]) < max then
  redis.call('sadd', KEYS[1], ARGV[1])
end
return 1
